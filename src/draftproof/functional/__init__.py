"""Verification rules as pure functions on tensors: the part other engines import."""

from draftproof.functional.chain import ChainVerdict, block_verify, token_verify

__all__ = ["ChainVerdict", "block_verify", "token_verify"]
