"""A benchmark's script on each of some ranks, which write their figures beside one another."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_ranks(
    script: str, given: Mapping[str, Any], ranks: int, environment: Mapping[str, str], progress: bool = False
) -> list[dict[str, Any]]:
    """Run ``script ARGUMENTS.json OUT`` on `ranks` ranks; returns what each wrote to ``OUT.<rank>``, in order.

    Args:
        script: in this folder.
        progress: let stderr through while it runs; else it is shown if a rank fails.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        told, out = Path(folder) / "arguments.json", Path(folder) / "figures.json"
        told.write_text(json.dumps(given))
        command = [sys.executable, *launcher, str(Path(__file__).with_name(script)), str(told), str(out)]
        errors = None if progress else subprocess.PIPE
        done = subprocess.run(
            command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(f"a rank failed:\n{(done.stderr or done.stdout)[-3000:]}")
        return [json.loads(Path(f"{out}.{rank}").read_text()) for rank in range(ranks)]
