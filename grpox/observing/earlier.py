"""How much disk the runs take that later ones in their folder have moved aside."""

from __future__ import annotations

import sys
from pathlib import Path

from grpox.errors.formatting import amount


def tell_size(earlier: Path) -> None:
    """Say in a line how much `earlier` holds, where there are checkpoints in it: nothing removes these."""
    if not any(earlier.glob("*/checkpoints/*")):
        return
    size = sum(path.stat().st_size for path in earlier.rglob("*") if path.is_file())
    told = f"the run that was here is now in {earlier}, which holds {amount(size)}; remove what you do not need"
    print(told, file=sys.stderr, flush=True)
