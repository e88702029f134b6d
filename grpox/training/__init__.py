"""The training loop, put together and run, and evaluation.

`run` opens the `inputs` of a checked run, some of them Python `arguments`, and `build` puts its parts
together. `trainer` is the loop: `generation_feed` gives each step its samples, `step_report` calls the
observers. `evaluation` samples and scores held-out prompts, in a run or alone, as `load_evaluation` reads it.
"""
