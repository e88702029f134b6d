"""The quickstart's small model and data, and the script that made them."""
