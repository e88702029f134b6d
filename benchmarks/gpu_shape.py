"""One candidate of the part `shapes` of gpu.py in a process of its own.

Usage: gpu_shape.py ARGUMENTS.json OUT; writes OUT.0
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from gpu_parts.part import Part
from gpu_parts.shapes import figures_of


def main(arguments: str, out: str) -> None:
    given = json.loads(Path(arguments).read_text())
    of_part = given["part"]
    part = Part(torch.device("cuda", 0), False, Path(of_part["folder"]), Path(of_part["out"]))
    part.figures, part.failures = of_part["figures"], of_part["failures"]
    Path(f"{out}.0").write_text(json.dumps(figures_of(part, given)))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
