"""Audits of running servers: answers are drawn over HTTP, and each sampled token is tested against the target."""
