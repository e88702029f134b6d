"""The data of the SmolLM2 recipe, and the script that made it."""
