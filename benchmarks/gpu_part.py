"""One part of gpu.py in a process of its own.

Usage: gpu_part.py ARGUMENTS.json, with the part's name, device, size, temporary folder and file of figures
"""

from __future__ import annotations

import importlib
import json
import logging
import sys
import traceback
from pathlib import Path

import torch
from gpu_parts.part import FAILED, OK, SKIPPED, Part, Skipped, describe


def run_part(part: Part, name: str) -> None:
    """Measure one part and write its verdict; no error leaves this function, but the user's own signals."""
    part.write("running")
    try:
        importlib.import_module(f"gpu_parts.{name}").measure(part)
    except Skipped as reason:
        part.write(SKIPPED, str(reason))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the part's reason; called scripts may exit
        traceback.print_exc()
        part.write(FAILED, "; ".join([*part.failures, describe(error)]))
    else:
        part.write(FAILED if part.failures else OK, "; ".join(part.failures))


def main(arguments: str) -> None:
    given = json.loads(Path(arguments).read_text())
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    device = torch.device(given["device"])
    if device.type == "cuda":
        torch.cuda.init()
        torch.cuda.set_device(0)
    run_part(Part(device, given["small"], Path(given["folder"]), Path(given["out"])), given["name"])


if __name__ == "__main__":
    main(sys.argv[1])
