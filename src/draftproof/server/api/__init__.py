"""The APIs that are served: their bodies, and how each words its answers."""
