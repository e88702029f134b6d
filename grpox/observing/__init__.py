"""Observers of a run: its local record, the terminal, and plugins with lifecycle hooks.

`observers` calls each hook separately. `record` writes config, versions and `record_files` (metrics,
completions) into the run's folder; `display` draws the terminal; `machine_metrics` measures the machine in a
thread. `early_stop` ends a run that stops improving. `report` writes an HTML page from a run's folder.
"""
