"""One candidate of the part `shapes` of gpu.py in a process of its own.

Usage: gpu_shape.py ARGUMENTS.json OUT; writes OUT.0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from gpu_parts.shapes import figures_of


def main(arguments: str, out: str) -> None:
    Path(f"{out}.0").write_text(json.dumps(figures_of(json.loads(Path(arguments).read_text()))))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
