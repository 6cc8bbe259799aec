"""Drafters make the drafted tokens, each with the distribution it was drawn from."""
