"""Makes the distribution of a new plugin out of templates: what ``grpox plugins new`` does."""
