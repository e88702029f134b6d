"""Run files changed at random: whatever comes of it is a checked run or problems, never another error."""

from __future__ import annotations

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzz_case import RUN, given_up_when_it_hangs

from grpox.errors import ConfigError
from grpox.runfile.load import load_run
from grpox.runfile.recipe_files import recipe_path

SEEDS = 400
ODD: list[Any] = [
    *(None, True, 0, -1, 2**70, 0.5, -1e308, float("inf")),
    *("", "x", "0", "../..", "a:b", "~", "\x1b[0m", "*", "quickstart/model"),
    *([], {}, [[]], {"name": "dapo"}, {"path": "run.yaml:x"}, [{"name": "exact"}], {"": {}}),
]
TOKENS = [b"[", b"{", b"*a", b"&a ", b"!!x ", b": ", b"\n", b"\t", b"<<: ", b"%", b"- "]


def _places(node: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value within `node`."""
    keys = node.keys() if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    return [place for key in keys for place in ((node, key), *_places(node[key]))]


def _mutated_nodes(run: dict[str, Any], chance: random.Random) -> dict[str, Any]:
    run = copy.deepcopy(run)
    for _ in range(chance.randint(1, 4)):
        places = _places(run)
        if not places:
            break
        container, key = chance.choice(places)
        match chance.randrange(4):
            case 0:
                del container[key]
            case 1:
                other, name = chance.choice(places)
                container[key] = copy.deepcopy(other.get(name) if isinstance(other, dict) else None)
            case 2 if isinstance(container, dict):
                container[f"{key}{chance.choice(['s', '_', ' ', '.x'])}"] = container.pop(key)
            case _:
                container[key] = copy.deepcopy(chance.choice(ODD))
    return run


def _mutated_bytes(text: bytes, chance: random.Random) -> bytes:
    data = bytearray(text)
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(data))
        end = at + chance.randint(0, 30)
        data[at:end] = chance.choice([b"", data[at:end] * 2, bytes([chance.randrange(256)]), *TOKENS])
    return bytes(data)


def _tried(text: bytes) -> str:
    """Return the outcome of a run file; an unexpected exception passes through."""
    Path("run.yaml").write_bytes(text)
    try:
        with given_up_when_it_hangs():
            load_run("run.yaml")
        return "run"
    except ConfigError as error:
        return "problems" if all(map(str, error.problems)) else "nothing said"


@pytest.mark.parametrize("part", range(4))
def test_changed_nodes_and_bytes_are_a_run_or_problems(part: int, case_folder: Path) -> None:
    good = [yaml.safe_dump(RUN).encode(), recipe_path("quickstart").read_bytes()]
    nodes, texts = set(), set()
    for seed in range(part * SEEDS // 8, (part + 1) * SEEDS // 8):
        chance = random.Random(seed)
        nodes.add(_tried(yaml.safe_dump(_mutated_nodes(RUN, chance), allow_unicode=True).encode()))
        texts.add(_tried(_mutated_bytes(chance.choice(good), chance)))
    assert nodes == {"run", "problems"}
    assert "problems" in texts <= {"run", "problems"}
