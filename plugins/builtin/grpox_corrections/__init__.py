"""The built-in corrections for the generator's distribution."""
