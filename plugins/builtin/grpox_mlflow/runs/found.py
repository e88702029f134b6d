"""Which run a user means: by its id or the beginning of one, its name, or its folder."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from grpox.errors import ConfigError, Problem, nearest, redact
from grpox_mlflow.runs.store import Store, default_uri, reading
from grpox_mlflow.runs.tracked import FOLDER_TAG, TrackedRun, moment, shown_path

_MOST_NAMED = 8
"""Runs that a message names."""
_LOOKED_AT = 200
"""Newest runs among which a slip is looked for."""


@contextmanager
def found(names: list[str], uri: str | None) -> Iterator[tuple[Store, list[TrackedRun]]]:
    """The store and the runs that `names` mean, in their order.

    Args:
        uri: of the store; default: that of the first name which is a run's folder, else that of a run.

    Raises:
        ConfigError: a name means no run, or several.
    """
    with reading(_store_of(names, uri)) as store:
        yield store, [_the_run(store, name) for name in names]


def _store_of(names: list[str], uri: str | None) -> str:
    default = default_uri(uri)
    from grpox_mlflow.followed import FollowedRun
    from grpox_mlflow.sync import address_of

    followed = (FollowedRun.read(Path(name)) for name in names)
    first = next((there for there in followed if there is not None), None)
    return default if uri is not None or first is None else address_of(first)


def _the_run(store: Store, name: str) -> TrackedRun:
    of_folder = _of_folder(store, name)
    if of_folder is not None:
        return of_folder
    matches = [run for condition in _conditions(name) for run in store.search(condition)]
    # A name may be the beginning of another run's id.
    distinct = list({run.run_id: run for run in matches}.values())
    whole = [run for run in distinct if run.run_id == name]
    if len(whole or distinct) == 1:
        return (whole or distinct)[0]
    raise ConfigError(_several(name, distinct) if distinct else _none(store, name))


def _of_folder(store: Store, name: str) -> TrackedRun | None:
    """The run whose record is in the folder `name`; where that is gone, the last that was written there."""
    from grpox_mlflow.followed import FollowedRun

    folder = Path(name)
    followed = FollowedRun.read(folder)
    if followed is None:
        # A run's name is no path.
        written = _quoted(str(folder.absolute())) if folder.name else None
        there = store.search(f"tags.`{FOLDER_TAG}` = {written}", most=1) if written else []
        return there[0] if there else None
    there = store.search(f"tags.`grpox.run` = '{followed.key}'", most=1)
    if there:
        return there[0]
    what = f"{redact(store.uri)} does not have the run in this folder"
    raise ConfigError(Problem(what, "RUN", given=name, allowed=f"after: grpox sync {name}"))


def _conditions(name: str) -> Iterator[str]:
    if re.fullmatch("[0-9a-f]{1,32}", name):
        yield f"attributes.run_id LIKE '{name}%'"
    quoted = _quoted(name)
    if quoted is not None:
        yield f"attributes.run_name = {quoted}"


def _quoted(text: str) -> str | None:
    """As MLflow's searches have it, which know no escapes; None where it has quotes of both kinds."""
    return next((f"{quote}{text}{quote}" for quote in "'\"" if quote not in text), None)


def _several(name: str, matches: list[TrackedRun]) -> Problem:
    told = [
        f"{run.short_id} ({run.name}, {run.status}, {moment(run.started)})" for run in matches[:_MOST_NAMED]
    ]
    more = f" and {len(matches) - _MOST_NAMED} more" if matches[_MOST_NAMED:] else ""
    return Problem(f"means {len(matches)} runs", "RUN", given=name, allowed=f"one of {', '.join(told)}{more}")


def _none(store: Store, name: str) -> Problem:
    runs = store.search(most=_LOOKED_AT)
    folders = [shown_path(run.folder) for run in runs if run.folder is not None]
    near = nearest(name, [*(run.name for run in runs), *(run.short_id for run in runs), *folders])
    if (Path(name) / "config.yaml").exists():
        what = "is the folder of a run that MLflow does not follow: its tracking names no mlflow"
        return Problem(what, "RUN", given=name)
    what = f"no such run in {redact(store.uri)}"
    return Problem(
        what, "RUN", given=name, allowed="id, name or folder of a run: grpox runs list", nearest=near
    )
