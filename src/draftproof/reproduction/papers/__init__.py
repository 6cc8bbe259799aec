"""The papers' numbers, each table and figure with its place in the paper."""
