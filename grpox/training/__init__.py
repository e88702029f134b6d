"""The training loop, put together and run, and evaluation.

`run` builds the parts of a checked run and starts `trainer`, the loop. `evaluation` samples and scores
held-out prompts, within a run or by `evaluate_model` without one. The `given_` modules check objects that a
Python caller passes.
"""
