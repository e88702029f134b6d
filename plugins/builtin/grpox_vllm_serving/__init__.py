"""A vLLM server for rollouts: `grpox serve` starts it, a token guards it, a run replaces its weights.

`launch` starts it; `guard`, `about` and `file_transfer` are loaded by vLLM inside it.
"""
