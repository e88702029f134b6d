"""One line of what `grpox doctor` found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Section = Literal["installed", "fit", "devices", "launchers", "generators", "plugins"]
Status = Literal["ok", "absent", "warning", "error"]
"""``absent``: not here, and grpox trains without; ``warning``: something may fail; ``error``: grpox cannot
train."""


@dataclass(frozen=True)
class Finding:
    """What was looked at, and how it is."""

    section: Section
    name: str
    status: Status
    told: str
    """One line: a version, a device, or what is wrong."""
    remedy: str = ""
    """The command that mends it."""
