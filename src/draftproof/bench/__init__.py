"""Benchmarks: cells measured in turns on the same questions, and what the measurements say."""
