"""Memory of a run, computed from its run file and the model's config.json."""
