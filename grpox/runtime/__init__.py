"""This process and those beside it: ranks, launchers, signals, waiting, files."""
