"""Drafters propose tokens, each with the distribution that it was drawn from."""
