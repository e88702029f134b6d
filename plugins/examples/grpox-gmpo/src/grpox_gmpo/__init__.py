"""GMPO, a policy loss for grpox."""
