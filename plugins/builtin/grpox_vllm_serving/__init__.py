"""A vLLM server for rollouts: `grpox serve` starts it, a token guards it, a run replaces its weights.

`launch` starts it; `protocol` and `file_transfer` are loaded by vLLM inside it.
"""
