"""An optimizer and a learning-rate schedule for grpox."""
