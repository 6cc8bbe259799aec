"""Speculative decoding for any Hugging Face causal language model, with an output law proven to be the target's."""

from draftproof._version import __version__

__all__ = ["__version__"]
