"""Rows become prompts, and prompts the schedule of a run.

`open_data` opens files, hub datasets and streams; `json_rows` reads JSON without changing values. `prompts`
turns rows into text and tokens, `row_stream` reads a stream by position. `schedule` is the batch arithmetic:
the prompts and rows of each step.
"""
