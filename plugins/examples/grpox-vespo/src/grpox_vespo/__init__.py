"""VESPO, a policy loss for grpox, and the correction that it folds into itself."""
