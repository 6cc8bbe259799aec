"""One recipe for each table or figure of the papers, scaled to the pairs that are at hand."""
