"""The report of a run: one HTML page made from the files that the run left in its folder."""
