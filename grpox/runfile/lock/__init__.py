"""The plugin lock: which code a run was made with, written beside it and compared across ranks and runs."""
