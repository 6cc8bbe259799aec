"""Verification rules for the engine: drafts and target rows in, verdicts out."""
