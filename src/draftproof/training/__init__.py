"""Training of drafters and heads: data, responses, features, the loop, and the directories that are written."""
