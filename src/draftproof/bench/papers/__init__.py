"""The papers' own figures, typed in from seeds 000 to 004, each with the place it comes from."""
