"""Checkpoints: everything that a run needs to go on as if nothing had happened.

`saver` writes one when it is due: files of weights (`shards`), what each rank has besides (`rank_state`),
`progress` and a manifest with every file's hash (`folders`). `resume` finds the newest that is whole, checks
that the run is still the same and puts it back, on another number of ranks too. `save_model` and `export`
write models for others, with their cards, and push them. `faults` keeps the batch of a step that was no
number, and computes it again.
"""
