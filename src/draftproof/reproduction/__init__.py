"""The papers' tables and figures, measured again on the available pairs of models."""
