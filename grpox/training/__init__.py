"""The training loop, put together and run, and evaluation.

`run` opens the `inputs` of a checked run, some of which a Python caller gave (`given`), and `build` puts its
parts together. `trainer` is the loop: `generation_feed` gives each step its samples, `step_report` tells the
observers. `evaluation` samples and scores held-out prompts, within a run or without one, as `load_evaluation`
reads it.
"""
