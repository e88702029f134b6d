"""LUSPO, a policy loss for grpox."""
