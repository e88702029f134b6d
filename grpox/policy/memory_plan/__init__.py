"""Memory that a run takes, by arithmetic on its run file and the model's config.json."""
