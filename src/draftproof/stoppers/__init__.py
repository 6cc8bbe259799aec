"""Stoppers decide how long drafts get. They may look at drafted tokens, but never discard one."""
