"""The papers' own figures, typed in, each with its place in the paper."""
