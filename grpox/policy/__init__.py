"""The policy: its model, adapters, ZeRO-3 engine, log-probabilities, and its weights on their way."""
