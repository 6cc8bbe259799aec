"""The slot cache: keys and values of what a model has read, their memory and sessions, and the layout of a pass."""
