"""Plugins: found, asked what they offer, bound and built."""
