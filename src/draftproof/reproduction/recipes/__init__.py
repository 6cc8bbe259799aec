"""One recipe for each table or figure of the papers, scaled to the pairs of models at hand."""
