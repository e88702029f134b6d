"""Converts a set-up for TRL's GRPOTrainer, read without running it, to a run file."""
