"""Backends on transformers' own forward pass, and what is built around its modules."""
