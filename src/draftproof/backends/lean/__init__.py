"""Our own forward pass for dense decoders."""
