"""Evaluation of trained parts on held-out text: a pair of models, a drafter, heads, and the text that models write."""
