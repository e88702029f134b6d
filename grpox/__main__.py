"""``python -m grpox``, and so ``torchrun -m grpox train RUN``."""

from __future__ import annotations

from grpox.cli.app import main

main()
