"""Samples become a loss, and the loss an optimizer step.

`policy_update` is the step: it fixes pi_old, goes forward and backward over every micro-batch, and steps.
`packing` decides which samples go through the model together, and weighs each token. `objective` puts mask,
loss, correction, KL and entropy of a run together. `mismatch` and `token_metrics` measure it, `nonfinite`
handles a step that is no number.
"""
