"""The optimizer step in float64 and plain loops, as the papers write it: what `step_gradient` is held to.

It shares no code with grpox and knows neither masks, padding nor tensors of more than one number: a completion is
the list of the tokens that the model wrote, and a gradient is that of one token's log-probability.
"""
