"""What ``grpox train --resume`` goes on with: a run's folder, or the run file whose folder it is."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from grpox.errors import ConfigError, Problem, nearest
from grpox.runfile.paths import unreachable

AUTO = "auto"
_CONFIG = "config.yaml"


def run_to_resume(run: str | None, overrides: Sequence[str], resume: str) -> tuple[str, list[str]]:
    """The run file and overrides to load.

    Args:
        run: a run file or recipe; None, or what is an override, stands for the config in the run's folder.
        resume: a run's folder, or ``auto`` for the output_dir of `run`.

    Raises:
        ConfigError: there is no such folder, or ``auto`` without a run file.
    """
    changes = list(overrides)
    if run is not None and "=" in run and not Path(run).exists():
        changes.insert(0, run)
        run = None
    if resume == AUTO:
        if run is None:
            what = "needs the run file whose folder is to be looked at"
            raise ConfigError(
                Problem(what, "--resume", given=AUTO, allowed="a run's folder, or RUN --resume auto")
            )
        return run, changes
    folder = Path(resume)
    if reason := unreachable(folder / _CONFIG):
        raise ConfigError(Problem(f"cannot be opened: {reason}", "--resume", given=resume))
    if not (folder / _CONFIG).is_file():
        raise ConfigError(_no_run(folder))
    return run or str(folder / _CONFIG), [*changes, f"output_dir={folder}"]


def _no_run(folder: Path) -> Problem:
    what = "holds no run" if folder.is_dir() else "no such folder"
    runs = sorted(str(found.parent) for found in folder.parent.glob(f"*/{_CONFIG}"))
    allowed = "a folder that a run has written" + (f", such as {', '.join(runs[:5])}" if runs else "")
    return Problem(what, "--resume", given=str(folder), allowed=allowed, nearest=nearest(str(folder), runs))
