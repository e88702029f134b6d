"""Runs the scripts of this folder, each of which takes steps under ZeRO-3 on one rank or several."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from support.processes import run

HERE = Path(__file__).parent


def run_script(script: str, *arguments: object, folder: Path, ranks: int = 1, cold: bool = False) -> None:
    """Run a script of this folder in `folder`; see `support.processes.run`."""
    done = run(HERE / script, *map(str, arguments), ranks=ranks, cwd=folder, cold=cold)
    assert done.returncode == 0, f"{script}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def results_of(script: str, *arguments: object, folder: Path, ranks: int = 1, cold: bool = False) -> Any:
    """Run ``SCRIPT OUT.pt ARGUMENTS`` and return what the script has saved."""
    import torch

    out = folder / f"{Path(script).stem}-{ranks}.pt"
    run_script(script, out, *arguments, folder=folder, ranks=ranks, cold=cold)
    return torch.load(out)


def relative_difference(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Return the norm of the difference of two gradients, as a part of the first one's."""
    import torch

    assert one.keys() == other.keys()
    flat = [torch.cat([each[name].flatten().double() for name in one]) for each in (one, other)]
    return float((flat[0] - flat[1]).norm() / flat[0].norm())
