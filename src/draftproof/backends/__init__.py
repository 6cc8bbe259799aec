"""Models as the engine sees them: sessions that read tokens and return rows of logits."""
