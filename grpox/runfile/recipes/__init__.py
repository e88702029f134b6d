"""Run files that come with grpox, with their models and data."""
