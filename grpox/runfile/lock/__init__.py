"""The plugin lock: a record of the code of a run, saved in its folder and compared across ranks and runs."""
