"""The optimizer step in float64 and plain loops, as the papers write it: what `step_gradient` is held to.

It shares no code with grpox. A completion is the list of the tokens that the model wrote: there is no mask, no
padding, and no tensor of more than one number below `step.py`.
"""
