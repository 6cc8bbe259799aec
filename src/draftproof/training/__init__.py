"""Training of the small parts that judge drafts: data, responses, features, one loop, provenance."""
