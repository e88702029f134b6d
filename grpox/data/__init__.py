"""Rows become prompts, and prompts the schedule of a run.

`open_data` opens files, hub datasets and streams; `json_rows` and `json_dataset` keep JSON as the file says
it. `prompts` makes text and tokens of the rows, `row_stream` reads a stream by position. `schedule` is the
batch arithmetic: which prompts and rows make up which step; with dynamic sampling `prompt_cursor` takes the
place of its order of prompts.
"""
