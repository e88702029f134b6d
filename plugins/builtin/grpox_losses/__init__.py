"""The built-in policy losses."""
