"""What other users of the machine may do with the files that a run writes: read them at most."""

from __future__ import annotations

import os
import stat


def keep_files_from_others() -> None:
    """From now on no file or folder of this process can be written by others, whatever its umask was."""
    os.umask(os.umask(stat.S_IRWXG | stat.S_IRWXO) | stat.S_IWGRP | stat.S_IWOTH)
