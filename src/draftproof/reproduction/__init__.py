"""The papers' tables and figures, measured again on the pairs of models at hand."""
