"""`grpox doctor`: what is installed, what of it fits together, and what this machine has."""
