"""Prompts: files, hub datasets and streams, as text and tokens."""
