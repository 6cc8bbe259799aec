"""Ways in from other libraries: transformers' generate and pipelines, lm-eval, vLLM, Ray, rollouts for training."""
