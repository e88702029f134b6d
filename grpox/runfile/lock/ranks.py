"""Whether all ranks of a run hold the same code, asked before the model loads."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from grpox.errors import ConfigError, Problem
from grpox.runfile.lock.differences import ABSENT, Difference, Severity, compare, config_differences
from grpox.runfile.lock.model import Lock
from grpox.runtime.logs import get_logger

if TYPE_CHECKING:
    from grpox.runtime.world import World


def check_ranks(world: World, lock: Lock, config: Mapping[str, Any]) -> None:
    """Refuse a run whose ranks hold different code; a collective of all ranks.

    A config that differs is only a warning, on rank 0: an override may be one of that machine. Plugins that
    observe unasked are passed over, because observers are called on rank 0 alone.

    Args:
        lock: this rank's.
        config: this rank's resolved config.

    Raises:
        ConfigError: on every rank alike, with one problem for each difference to rank 0.
    """
    lock = lock.selected()
    told = world.gather([(lock.digest, socket.gethostname())])
    digests = [digest for digest, _ in told]
    if len(set(digests)) == 1:
        return
    # The first rank of each lock sends it, as text: another version of grpox may have other classes.
    speaks = digests.index(lock.digest) == world.rank
    texts = world.gather([json.dumps([lock.text(), config], default=str)] if speaks else [])
    sent = [(Lock.model_validate_json(text), held) for text, held in map(json.loads, texts)]
    problems, warnings = across_ranks(told, sent)
    for warning in warnings if world.is_main else ():
        get_logger(__name__).warning("%s", warning)
    if problems:
        raise ConfigError(problems)


def across_ranks(
    told: Sequence[tuple[str, str]], sent: Sequence[tuple[Lock, Mapping[str, Any]]]
) -> tuple[list[Problem], list[str]]:
    """What of other ranks' code differs from rank 0's, and a warning for each other config.

    Args:
        told: (digest of the lock, host) of each rank.
        sent: each lock with a resolved config, in the order in which `told` first has its digest.
    """
    first, first_config = sent[0]
    there = f"rank 0 ({told[0][1]})"
    problems: list[Problem] = []
    warnings: list[str] = []
    for digest, (other, config) in zip(dict.fromkeys(digest for digest, _ in told), sent, strict=True):
        here = _ranks([(rank, host) for rank, (one, host) in enumerate(told) if one == digest])
        problems += [_problem(found, here, there) for found in compare(first, other) if _is_refused(found)]
        changed = [found for found in config_differences(first_config, config) if not _is_place(found)]
        if changed:
            lines = [f"    {found.what}: {found.new}, not {found.old}" for found in changed]
            warnings.append("\n".join([f"{here}: another config than that of {there}", *lines]))
    return problems, warnings


def _ranks(held: Sequence[tuple[int, str]]) -> str:
    """``rank 1 (node-b)``, ``ranks 8, 9, 10 (node-b, node-c)``."""
    numbers = ", ".join(str(rank) for rank, _ in held)
    hosts = ", ".join(dict.fromkeys(host for _, host in held))
    return f"rank{'s' if len(held) > 1 else ''} {numbers} ({hosts})"


def _is_refused(found: Difference) -> bool:
    """Other code, or another version of a library; one that is missing is not needed, or was told before."""
    missing = ABSENT in (found.old, found.new)
    return found.severity is Severity.DRIFT or (found.severity is Severity.ENVIRONMENT and not missing)


def _problem(found: Difference, here: str, there: str) -> Problem:
    what = f"{here}: {found.what} is not that of {there}; install the same on every machine"
    return Problem(what, given=found.new, allowed=found.old)


def _is_place(found: Difference) -> bool:
    """Whether two paths differ: machines may keep their files in different places."""
    return os.path.isabs(found.old) and os.path.isabs(found.new)
