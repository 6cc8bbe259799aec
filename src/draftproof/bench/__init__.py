"""Benchmarks: compositions of our engine and other engines, measured in turns on the same questions."""
