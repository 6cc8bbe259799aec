"""Draft heads as backends: ours, and those that others publish."""
