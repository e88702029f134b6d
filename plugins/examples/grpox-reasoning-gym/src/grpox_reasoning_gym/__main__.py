"""``python -m grpox_reasoning_gym run.yaml heldout.jsonl``: held-out rows for a run's evaluation.

The run's own settings make them with another seed. None has a prompt that the run trains on.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import yaml
from grpox.errors import ConfigError, GrpoxError
from grpox.errors.validation import problems_of
from pydantic import ValidationError

from grpox_reasoning_gym.config import SourceConfig
from grpox_reasoning_gym.rows import Row, rows

ROUNDS = 20
"""Attempts to draw rows, while too few have a prompt that training lacks."""


def main(arguments: list[str] | None = None) -> int:
    """Write the rows; 2 where the run file or the request is wrong."""
    parser = argparse.ArgumentParser("python -m grpox_reasoning_gym", description=__doc__)
    parser.add_argument("run", type=Path, metavar="RUN.yaml", help="a run file with this data.source")
    parser.add_argument("out", type=Path, metavar="OUT.jsonl")
    parser.add_argument("--size", type=int, default=200, help="rows (default 200)")
    parser.add_argument("--seed", type=int, default=1, help="another one than the run's (default 1)")
    given = parser.parse_args(arguments)
    try:
        chosen = heldout(source_of(given.run), given.size, given.seed)
        given.out.write_text("".join(json.dumps(row) + "\n" for row in chosen), encoding="utf-8")
    except (GrpoxError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(chosen)} rows: {given.out}")
    return 0


def source_of(path: Path) -> SourceConfig:
    """Read the source of a run file, and nothing else of it.

    Raises:
        ConfigError: its data is not of this source, or the source's parameters are wrong.
    """
    try:
        data: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
        source = dict(data["data"]["source"])
        name = str(source.pop("name"))
    except (yaml.YAMLError, KeyError, TypeError, ValueError) as error:
        allowed = "a mapping with name: reasoning-gym"
        raise ConfigError("cannot be found", "data.source", str(path), allowed=allowed) from error
    if name.rpartition(":")[2] != "reasoning-gym":
        raise ConfigError("is another source", "data.source.name", str(path), given=name)
    try:
        return SourceConfig.model_validate(source)
    except ValidationError as error:
        raise ConfigError(problems_of(error, SourceConfig, "data.source")) from error


def heldout(config: SourceConfig, size: int, seed: int) -> list[Row]:
    """Draw `size` rows with another seed, each with a prompt that neither training nor an earlier row has.

    Raises:
        ConfigError: `size` is below 1, the seed is training's, or the tasks have too few different prompts.
    """
    if size < 1:
        raise ConfigError("is less than one row", "--size", given=str(size))
    if seed == config.seed:
        raise ConfigError("is the seed of training", "--seed", given=str(seed))
    trained = {json.dumps(row["prompt"]) for row in rows(config)}
    chosen: dict[str, Row] = {}
    for number in range(ROUNDS):
        # Further rounds have seeds that no run is likely to name.
        for row in rows(config.model_copy(update={"size": size, "seed": seed + number * 2**32})):
            if (prompt := json.dumps(row["prompt"])) not in trained:
                chosen.setdefault(prompt, row)
        if len(chosen) >= size:
            return list(chosen.values())[:size]
    what = f"only {len(chosen)} prompts were found that training does not have"
    raise ConfigError(what, "--size", given=str(size), allowed="fewer, or a smaller data.source.size")


if __name__ == "__main__":
    sys.exit(main())
