"""Checkpoints: everything that a run needs to go on as if nothing had happened."""
