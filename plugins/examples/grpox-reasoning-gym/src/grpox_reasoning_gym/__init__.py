"""reasoning-gym's tasks and scorers for grpox."""
