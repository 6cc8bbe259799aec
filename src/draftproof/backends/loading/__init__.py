"""Loading of models by name: weights, tokenizers and their checks."""
