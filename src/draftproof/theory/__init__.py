"""Acceptance rates, lengths, times and best policies, computed from probabilities without running a model."""
