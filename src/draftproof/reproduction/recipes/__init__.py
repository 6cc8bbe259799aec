"""One recipe for each table or figure of the papers, scaled to the available pairs of models."""
