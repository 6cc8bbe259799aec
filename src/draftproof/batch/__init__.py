"""Many prompts from a file: rows with ids in and out, results on disk as they come, runs that can be interrupted."""
