"""Converts a setup for TRL's GRPOTrainer to a run file, without running it."""
