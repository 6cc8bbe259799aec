"""Models by name: the door through which weights, tokenizers and their checks come."""
