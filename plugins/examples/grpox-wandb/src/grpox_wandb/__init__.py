"""Weights & Biases as an observer of grpox's runs."""
