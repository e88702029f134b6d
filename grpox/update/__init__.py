"""The optimizer step: from samples to a loss, and from the loss to new weights.

`policy_update` is the step: it computes pi_old, runs forward and backward over every micro-batch, and steps.
`packing` decides which samples go through the model together, and weighs each token. `objective` combines mask,
loss, correction, KL and entropy of a run. `mismatch` and `token_metrics` measure the step, `nonfinite` handles
a step whose loss or gradient is not finite.
"""
