"""Checkpoints: everything that a run needs to go on as if nothing had happened.

`saver` writes one when it is due: files of weights (`shards`), each rank's own state (`rank_state`), the states
of the run's `components`, `progress`, and a manifest with all hashes (`folders`). `resume` finds the newest
whole one, checks that the run is the same and restores it, on another number of ranks too. `save_model` and
`export` write models for others, with their cards, and push them. `faults` saves the batch of a faulty step.
"""
