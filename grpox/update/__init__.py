"""From micro-batches over the loss to the optimizer's step."""
