"""The Python that the pages show is executed and does what they say; of a training run all but the training."""

from __future__ import annotations

import ast
import asyncio
import json
import pkgutil
import re
import shlex
import time
from collections.abc import Iterator
from pathlib import Path

from peft import LoraConfig, get_peft_model
from support.docs_blocks import INLINE, PAGES, ROOT, Block, blocks_in, name_of, prose, training_replaced
from support.docs_folder import RECIPES, block_with, executed, prepare
from support.docs_install import Install
from support.handlers import invoke
from support.patience import patient
from transformers import AutoModelForCausalLM

from grpox import ComponentSpec
from grpox.plugins.loader import new_manager
from grpox.runfile.load import ResolvedRun
from grpox.testing import LossConformance
from grpox.testing.runner import outcomes

ELSEWHERE = {
    ("docs/algorithms.md", "step_gradient"): "test_docs.py",
    ("docs/python.md", "run.step()"): "../runs/test_python_door.py",
}
"""Page and text of a block -> the test that executes it; see `executed_blocks` for the others."""


def checks_passed(suite: type[LossConformance]) -> int:
    found = [outcome.status for outcome in outcomes(suite())]
    assert set(found) == {"passed"}
    return len(found)


def test_the_loss_in_15_lines_holds_to_its_contract(tmp_path: Path) -> None:
    prepare(tmp_path, "README.md")
    assert "Reinforce" in executed("README.md", "class Reinforce")
    suite = type("Suite", (LossConformance,), {"component": {"path": "my_loss.py:Reinforce"}})
    assert checks_passed(suite) >= 21


def test_two_lines_are_a_test_of_a_plugin(tmp_path: Path, install: Install) -> None:
    assert invoke(["plugins", "new", "mine", "--kind", "loss"]).code == 0
    install(tmp_path / "grpox-mine")
    assert checks_passed(executed("docs/conformance.md", "class TestMine")["TestMine"]) >= 21


def test_the_formula_of_the_paper_is_that_of_the_loss() -> None:
    """All checks and the comparison, in which the upper clip is another one than the default."""
    suite = executed("docs/conformance.md", "def paper")["TestDapo"]
    assert "test_same_as_reference" in {check.name for check in suite().checks()}
    assert checks_passed(suite) >= 22


def test_a_plugin_offers_what_its_module_says() -> None:
    shown = block_with("docs/plugin-api.md", "api=1").text
    assert eval(shown, {"ComponentSpec": ComponentSpec}).api == 1
    loss = executed("plugins/README.md", "def grpox_losses")
    environment = executed("docs/own-environment.md", "def grpox_environments")
    manager = new_manager()
    for hook, names in (("grpox_losses", loss), ("grpox_environments", environment)):
        manager.register(type("Plugin", (), {hook: staticmethod(names[hook])}), hook)
    [[mine]], [[guess]] = manager.hook.grpox_losses(), manager.hook.grpox_environments()
    told = (mine.name, mine.target, mine.config, guess.name, guess.target)
    config = "my_package.config:MineConfig"
    assert told == ("mine", "my_package.loss:Mine", config, "guess", "my_package.guess:Guess")


def test_a_plugins_command_is_called_like_any_other(tmp_path: Path, install: Install) -> None:
    plugin = block_with("docs/own-command.md", "def grpox_commands")
    command = block_with("docs/own-command.md", "def best")
    for block in (plugin, command, block_with("docs/own-command.md", "[project.entry-points")):
        path = tmp_path / "grpox-best" / str(block.file)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(block.text, encoding="utf-8")
    install(tmp_path / "grpox-best")
    assert "Print the highest value of a run's metric." in invoke(["--help"]).output
    run = tmp_path / "runs" / "quickstart"
    run.mkdir(parents=True)
    rewards = {1: 0.5, 97: 0.9375, 98: 0.75}
    lines = [{"step": step, "metrics": {"reward": reward}} for step, reward in rewards.items()]
    (run / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    shown = block_with("docs/own-command.md", "$ grpox best").text.splitlines()
    assert invoke(shlex.split(shown[0])[2:]).output.splitlines() == shown[1:]
    assert invoke(["best", "no-such-run"]).code == 2


def test_three_forms_of_a_reward() -> None:
    async def ask(prompt: str, completion: str) -> float:
        return float(len(prompt) + len(completion))

    names = executed("docs/rewards.md", "def near_20", ask=ask)
    assert names["near_20"](prompts=["1"], completions=["a" * 18]) == [-2]
    assert names["right"](["1 ", "2"], ["1", "1"]) == [1.0, 0.0]
    assert asyncio.run(names["judged"](prompts=["1"], completions=["22"], answer=["3"])) == [3.0]
    is_short = executed("docs/run-file.md", "def is_short(completions, answer")["is_short"]
    assert is_short(completions=["123", "1234"], answer=["123", "123"], prompts=["", ""]) == [1.0, 0.0]


def test_a_judge_in_a_process_is_started_again_when_it_was_late(tmp_path: Path) -> None:
    (tmp_path / "judge.py").write_text(
        "import time\nfrom grpox.runtime.child import connect_to_parent\nparent = connect_to_parent()\n"
        "while True:\n"
        "    asked = parent.recv_bytes()\n"
        "    time.sleep(1000 * (asked == b'for ever'))\n"
        "    parent.send_bytes(asked.upper())\n"
    )
    names = executed("docs/rewards.md", "Restarted(lambda")
    try:
        assert names["ask"](b"right", time.monotonic() + patient(60)) == b"RIGHT"
        assert names["ask"](b"for ever", time.monotonic() + 0.1) is None
        assert names["ask"](b"again", time.monotonic() + patient(60)) == b"AGAIN"
    finally:
        names["judge"].close()


def trained(page: str, text: str) -> ResolvedRun:
    """The run that a page's block asks for, checked and not trained."""
    with training_replaced() as runs:
        executed(page, text)
    [run] = runs
    return run


def test_the_pages_train_with_functions_and_weights(tmp_path: Path) -> None:
    prepare(tmp_path, "docs/python.md")
    (tmp_path / "mine").mkdir()  # of `grpox init mine`, which the README calls before
    text = "model: {path: ../my-model}\ndata: {path: ../train.jsonl}\nrewards: [exact]\n"
    (tmp_path / "mine" / "run.yaml").write_text(text)
    runs = trained("README.md", "from grpox import train"), trained("docs/python.md", "def longest")
    names = [function.__name__ for run in runs for function in run.given.functions.values()]
    assert names == ["is_short", "longest"]
    weighted = trained("docs/python.md", "runs/weighted")
    assert [reward.weight for reward in weighted.config.rewards] == [1, 0.2, 0.1]


def test_adapters_are_loaded_by_peft(tmp_path: Path) -> None:
    (tmp_path / "my-model").symlink_to(RECIPES / "quickstart" / "model")
    base = AutoModelForCausalLM.from_pretrained("my-model")
    get_peft_model(base, LoraConfig(r=2, target_modules="all-linear")).save_pretrained("runs/mine/adapter")
    model = executed("docs/lora.md", "PeftModel")["model"]
    assert any("lora_A" in name for name, _ in model.named_parameters())


def executed_blocks() -> Iterator[Block]:
    """Yield the blocks that the tests of this file and of test_docs_components.py name."""
    for file in (Path(__file__), Path(__file__).with_name("test_docs_components.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            match node:
                case ast.Call(
                    ast.Name("executed" | "trained" | "block_with"),
                    [ast.Constant(str(page)), ast.Constant(str(text)), *_],
                ):
                    yield block_with(page, text)


def test_every_block_is_executed() -> None:
    done = {block.place for block in executed_blocks()} | {block_with(*at).place for at in ELSEWHERE}
    shown = {block.place for block in blocks_in("python") if not block.is_done_by_the_tutorial}
    assert shown == done & {block.place for block in blocks_in("python")}
    for (page, _), test in ELSEWHERE.items():
        assert Path(page).name in Path(__file__).parent.joinpath(test).read_text(encoding="utf-8")


SOURCES = "".join(
    path.read_text(encoding="utf-8")
    for at in ("grpox", "plugins/builtin")
    for path in (ROOT / at).rglob("*.py")
)
NAME = re.compile(r"(grpox(?:\.[A-Za-z_]\w*)+)(?:$|\()")
NAMED = {
    (name_of(page), match[1]): None
    for page in PAGES
    for code in INLINE.findall(prose(page))
    if (match := NAME.match(code)) and not code.endswith(".json")
}


def test_every_name_of_the_prose_is_there() -> None:
    """As what can be imported, or as text: a tag in MLflow."""
    assert len(NAMED) > 8
    for _, name in NAMED:
        assert f'"{name}"' in SOURCES or pkgutil.resolve_name(name)
