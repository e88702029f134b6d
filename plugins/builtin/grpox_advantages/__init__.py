"""The built-in advantages."""
