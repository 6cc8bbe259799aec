"""Stoppers decide how long drafts get: they look at the drafted tokens, and never discard one."""
