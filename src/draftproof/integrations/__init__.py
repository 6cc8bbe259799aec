"""Ways in from other libraries: transformers' generate and pipelines, lm-eval, vLLM, rollouts for training."""
