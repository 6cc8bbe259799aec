"""The OpenAI-compatible server: HTTP in front of one engine that a thread of its own runs."""
