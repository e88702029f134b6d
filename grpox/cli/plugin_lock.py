"""``grpox plugins lock`` and ``diff``: the lock of a run that is not run, and what separates two."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from grpox.errors import ConfigError, Problem

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from grpox.runfile.lock.differences import Difference
    from grpox.runfile.lock.model import Lock


def tell_lock(run: str, overrides: Sequence[str], world_size: int | None, output: Path | None) -> None:
    """Print the lock of a run file, recipe, run folder or lock file; or write it to `output` and print that."""
    text = _lock(run, overrides, world_size).text()
    if output is None:
        typer.echo(text, nl=False)
        return
    try:
        output.write_text(text, encoding="utf-8")
    except OSError as error:
        what = f"cannot be written: {error.strerror}"
        raise ConfigError(Problem(what, "--output", given=str(output))) from error
    typer.echo(output)


def tell_differences(old: Path, new: Path, console: Console) -> bool:
    """Draw a table of what separates two runs, or say that nothing does; returns whether something does."""
    from grpox.runfile.lock.differences import RESOLVED_CONFIG, by_gravity, compare
    from grpox.runfile.lock.file import read_lock

    found = compare(read_lock(old), read_lock(new))
    if keys := _config_differences(old, new):
        # The keys say more than that the hash is another.
        found = by_gravity([*(one for one in found if one.what != RESOLVED_CONFIG), *keys])
    if not found:
        console.print(f"no difference between {old} and {new}", markup=False, highlight=False, soft_wrap=True)
        return False
    console.print(_table(found, str(old), str(new)))
    return True


def _lock(run: str, overrides: Sequence[str], world_size: int | None) -> Lock:
    from grpox.cli.arguments import tell_warnings
    from grpox.runfile.load import load_run
    from grpox.runfile.lock.file import LOCK_FILE, read_lock
    from grpox.runfile.lock.of_run import lock_of

    path = Path(run)
    if (path / LOCK_FILE).is_file() or (path.suffix == ".json" and path.is_file()):
        if overrides:
            what = "changes go with a run file or recipe; a run that was made cannot be changed"
            raise ConfigError(Problem(what, given=" ".join(overrides)))
        return read_lock(path)
    resolved = load_run(run, overrides, world_size)
    tell_warnings(resolved.registry.plugins)
    return lock_of(resolved)


def _config_differences(old: Path, new: Path) -> list[Difference]:
    """The keys that differ, where both are folders of runs, which hold their configs."""
    from grpox.runfile.lock.differences import config_differences

    configs = [_config(folder) for folder in (old, new)]
    return config_differences(*configs) if all(configs) else []


def _config(folder: Path) -> dict[str, Any]:
    from grpox.runfile.yaml_lines import read_yaml

    file = folder / "config.yaml"
    if not file.is_file():
        return {}
    data = read_yaml(file.read_text(encoding="utf-8"), str(file)).data
    return data if isinstance(data, dict) else {}


def _table(found: Sequence[Difference], old: str, new: str) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("", "what", old, new):
        # Folded: a value that is cut cannot be compared.
        table.add_column(Text(heading), overflow="fold")
    styles = {"drift": "red", "environment": "yellow"}
    for one in found:
        severity = Text(one.severity.value, styles.get(one.severity.value, ""))
        table.add_row(severity, Text(one.what), Text(one.old), Text(one.new))
    return table
