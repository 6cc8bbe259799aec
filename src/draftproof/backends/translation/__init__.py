"""Draft models with another vocabulary than the target's: which tokens are shared, and how texts are translated."""
