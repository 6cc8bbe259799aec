"""Closed forms: what acceptance, lengths and time the rules can and do reach, without running a model."""
