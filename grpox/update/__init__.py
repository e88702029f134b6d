"""Micro-batches become a loss, and the loss an optimizer step.

`policy_update` is the step: it fixes pi_old, goes forward and backward over every micro-batch, and steps.
`micro_batch` is this rank's part of one, `packing` decides which sequences go through the model together.
`forward` computes log-probabilities and the terms of the loss; `step_loss` and `objective` put mask, loss,
correction, KL and entropy together, weighted by `reduction`. `mismatch` and `token_metrics` measure it,
`nonfinite` handles a step that is no number.
"""
