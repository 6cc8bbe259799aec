"""The one place that knows the version."""

__version__ = "0.2.0"
