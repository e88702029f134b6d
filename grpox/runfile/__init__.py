"""Run files: read, overridden, checked, described."""
