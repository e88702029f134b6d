"""The environments and tools that the pages show keep their contract, and do what they say."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from support.docs_folder import block_with, prepare

from grpox.environments.contract import tool_problem
from grpox.plugins.loader import new_manager
from grpox.testing import EnvironmentConformance
from grpox.testing.runner import outcomes

PAGE = "docs/own-environment.md"


def executed(text: str, page: str = PAGE) -> dict[str, Any]:
    block = block_with(page, text)
    names: dict[str, Any] = {"__name__": __name__}
    exec(compile(block.text, block.place, "exec"), names)
    return names


@pytest.mark.parametrize("path", ["guess.py:Guess", "shop.py:Shop"])
def test_the_environments_conform(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prepare(tmp_path, PAGE)
    monkeypatch.chdir(tmp_path)
    results = list(outcomes(type("Suite", (EnvironmentConformance,), {"component": {"path": path}})()))
    assert {each.title: each.what for each in results if each.status != "passed"} == {}
    assert len(results) >= 11


def test_a_guess_is_answered_by_hand() -> None:
    guess = executed("class Guess")["Guess"]
    game = guess(guess.Config(highest=7, guesses=3))
    assert game.reset({"prompt": ""}, seed=5) == "It is from 0 to 7."
    number = random.Random(5).randint(0, 7)
    assert game.number == number
    assert game.reply(str(number + 1)) == "lower"
    assert game.reply("nothing") == "higher"
    assert game.reply(str(number)) is None
    assert (game.reward(), game.info()) == (1.0, {"success": True, "guesses": 3})
    lost = guess(guess.Config(guesses=1))
    lost.reset({}, seed=5)
    assert (lost.reply("no number"), lost.reward()) == (None, 0.0)


def test_the_shop_sells_what_the_purse_can_pay() -> None:
    shop = executed("class Shop")["Shop"]()
    with pytest.raises(ValueError, match="6 is more than the 4"):
        shop.buy("bread", 2)
    assert (shop.buy("apple"), shop.reward()) == ("2 left.", 1.0)
    assert (shop.buy("apple"), shop.reward()) == ("0 left.", 0.0)


def test_the_module_of_a_package_offers_its_environment() -> None:
    names = executed("def grpox_environments")
    manager = new_manager()
    manager.register(type("Plugin", (), {"grpox_environments": staticmethod(names["grpox_environments"])}))
    [[spec]] = manager.hook.grpox_environments()
    assert (spec.name, spec.target) == ("guess", "my_package.guess:Guess")


def test_the_tools_of_a_run_file_can_be_called() -> None:
    names = executed("async def search", "docs/run-file.md")
    assert [tool_problem(names[name], name) for name in ("add", "search")] == ["", ""]
    assert names["add"](37, 48) == 85
    assert asyncio.run(names["search"]("cats")) == "nothing about cats"
