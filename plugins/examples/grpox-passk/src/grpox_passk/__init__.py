"""Pass@k training, an advantage for grpox."""
