"""The reward of this recipe, as one would write it for TRL."""


def close_to_20_characters(completions, **kwargs):
    """0 for a summary of 20 characters, one less for every character more or fewer."""
    return [-abs(20 - len(completion)) for completion in completions]
