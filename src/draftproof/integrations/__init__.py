"""Ways in from other libraries: transformers' generate and pipelines, lm-eval, rollouts for reinforcement learning, vLLM."""
