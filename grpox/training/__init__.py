"""The training loop, put together and run, and evaluation.

`run` opens the inputs of a checked run, `build` puts its parts together, with those of `assembly` that an
evaluation has too. `trainer` is the loop: `generation_feed` gives each step its samples, `step_report` tells
the observers. `evaluation` samples and scores held-out prompts, within a run or by `evaluate_model` without
one. The `given_` modules check objects that a Python caller passes.
"""
