"""The papers' tables and figures, measured again on the pairs at hand."""
