"""A set-up for TRL's GRPOTrainer, read without running it, and the run file that does the same."""
