"""Every causal language model that transformers has, made tiny, and compared with transformers' own generation."""
