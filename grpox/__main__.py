"""``python -m grpox``, and so ``torchrun -m grpox train RUN``."""

from __future__ import annotations

from grpox.cli import script

script()
