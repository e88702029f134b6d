"""``grpox plugins lock`` prints the lock of a run without running it; ``diff`` compares two runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from grpox.errors import ConfigError

if TYPE_CHECKING:
    from grpox.errors.console import Console
    from grpox.runfile.lock.model import Lock


def tell_lock(run: str, overrides: Sequence[str], world_size: int | None, output: Path | None) -> None:
    """Print the lock of a run file, recipe, run folder or lock file; or write it to `output`."""
    text = _lock(run, overrides, world_size).text()
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot be written: {error.strerror}", "--output", given=str(output)) from error
    typer.echo(output)


def _lock(run: str, overrides: Sequence[str], world_size: int | None) -> Lock:
    from grpox.cli.arguments import tell_warnings
    from grpox.runfile.load import load_run
    from grpox.runfile.lock.model import LOCK_FILE, read_lock
    from grpox.runfile.lock.of_run import lock_of

    path = Path(run)
    if (path / LOCK_FILE).is_file() or (path.suffix == ".json" and path.is_file()):
        if overrides:
            what = "overrides need a run file or recipe: they cannot change a finished run or a lock file"
            raise ConfigError(what, given=" ".join(overrides))
        return read_lock(path)
    resolved = load_run(run, overrides, world_size)
    tell_warnings(resolved.registry.plugins)
    return lock_of(resolved)


def tell_differences(old: Path, new: Path, console: Console) -> bool:
    """Print a table of the differences between two runs; return False if there are none."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from grpox.runfile.lock.differences import RESOLVED_CONFIG, by_gravity, compare, config_differences
    from grpox.runfile.lock.model import read_lock

    differences = compare(read_lock(old), read_lock(new))
    configs = [_config(folder) for folder in (old, new)]
    if all(configs) and (keys := config_differences(*configs)):
        # The differing keys are more informative than the hash.
        differences = by_gravity([*(each for each in differences if each.what != RESOLVED_CONFIG), *keys])
    if not differences:
        console.print(f"no difference between {old} and {new}", markup=False, highlight=False, soft_wrap=True)
        return False
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "what", str(old), str(new)):
        # Long values are folded, not cut, so that they can be compared.
        table.add_column(Text(heading), overflow="fold")
    styles = {"drift": "red", "environment": "yellow"}
    for each in differences:
        severity = Text(each.severity.value, styles.get(each.severity.value, ""))
        table.add_row(severity, Text(each.what), Text(each.old), Text(each.new))
    console.print(table)
    return True


def _config(folder: Path) -> dict[str, Any]:
    """Read the resolved config in a run's folder; empty if there is none."""
    from grpox.runfile.yaml_lines import read_yaml

    file = folder / "config.yaml"
    data = read_yaml(file.read_text(encoding="utf-8"), str(file)).data if file.is_file() else {}
    return data if isinstance(data, dict) else {}
