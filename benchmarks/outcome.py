"""The end of a benchmark: its figures as a JSON object, on the last line and in the file of --out."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def add_out(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, help="also write the JSON object here")


def tell(result: Mapping[str, Any], out: Path | None) -> None:
    if out:
        out.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result))
