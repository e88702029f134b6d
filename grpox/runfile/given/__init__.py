"""Objects given in Python, in place of what a run file names."""
