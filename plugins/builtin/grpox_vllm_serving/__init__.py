"""A vLLM server for rollouts: `grpox serve` starts it, a token protects it, a run replaces its weights.

`launch` starts the server; vLLM loads `protocol` and `file_transfer` inside it.
"""
