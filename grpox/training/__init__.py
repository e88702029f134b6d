"""The training loop, put together and run; evaluation."""
