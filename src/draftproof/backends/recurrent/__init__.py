"""Layers with a recurrent state: which they are, and what they keep."""
