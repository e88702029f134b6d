"""Types of parameters that are paths of a run's inputs: the core makes them absolute and checks them.

A relative one starts from the run file's folder, or from the working directory where it was given on the
command line (`grpox.runfile.parameter_paths`).
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated


class Input(Enum):
    """What stands under the path."""

    PATH = "path"
    """A file or a folder."""
    MODEL = "model"
    """A model folder in Hugging Face format, or a hub id, which stays as it is."""


InputPath = Annotated[str, Input.PATH]
"""The path of a file or folder that must be there."""
ModelPath = Annotated[str, Input.MODEL]
"""A model: a folder with a config.json, or a hub id."""
