"""The papers' own figures, typed in, each with the place it comes from."""
