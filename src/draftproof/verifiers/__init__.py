"""Verification rules as the engine calls them: drafts and target rows in, verdicts out."""
