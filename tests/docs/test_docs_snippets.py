"""The run files that the pages show load, and their commands end well, but for those that train or serve."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.docs_blocks import (
    COMMANDS,
    ROOT,
    Block,
    Command,
    blocks_in,
    files_of,
    name_of,
    training_left_out,
)
from support.docs_folder import made_by, prepare
from support.docs_install import Install, install_example
from support.handlers import invoke

from grpox.config import RunConfig
from grpox.runfile.load import load_run
from grpox.runfile.yaml_lines import read_yaml

ELSEWHERE = {
    "plugins/examples/grpox-tensorboard/README.md": "needs tensorboard; tests/packaging installs it",
    "plugins/examples/grpox-wandb/README.md": "needs wandb; tests/packaging installs it",
}
"""Pages of which nothing is run here, and why."""

WHOLE = {name for name, field in RunConfig.model_fields.items() if field.is_required()}
ADDED_TO = {"checkpoint", "deepspeed", "model", "sampling", "train"}
"""Sections of which a page shows the keys that it is about; any other is replaced by what the page shows."""
RANKS = {"tensor_parallel_size: 2": 2}
"""Text of a block -> number of ranks that it needs."""
RUN_FILES = [
    block
    for block in blocks_in("yaml")
    if not block.is_done_by_the_tutorial and name_of(block.page) not in ELSEWHERE
]


def run_file(block: Block) -> dict[str, Any]:
    """A block that is a run file, or README's run file with a block's keys."""
    shown: dict[str, Any] = read_yaml(block.text, block.place).data
    if shown.keys() >= WHOLE:
        return shown
    run: dict[str, Any] = read_yaml(files_of("README.md")["run.yaml"], "run.yaml").data
    for key, value in shown.items():
        run[key] = {**run.get(key, {}), **value} if key in ADDED_TO else value
    return run


@pytest.mark.parametrize("block", RUN_FILES, ids=lambda block: block.place)
def test_a_run_file_of_the_docs_loads(
    block: Block, tmp_path: Path, install: Install, install_distributions: Callable[[str], None]
) -> None:
    prepare(tmp_path, name_of(block.page))
    install_distributions(block.text)
    install_example(block.page, install)
    Path("shown.yaml").write_text(yaml.safe_dump(run_file(block)), encoding="utf-8")
    ranks = max((count for text, count in RANKS.items() if text in block.text), default=1)
    run = load_run("shown.yaml", world_size=ranks)
    assert {"loss", "generator"} <= run.components.keys()


PARSED_ONLY = {
    "serve": "starts a server of vLLM's; tests/services/vllm/test_vllm_server.py does",
    "--install-completion": "writes into a shell's settings; tests/unit/cli/test_commands.py has its answers",
}
"""Commands that are not run, by their first words, and why."""
RUN_HERE = [
    command
    for command in COMMANDS
    if not (
        command.block.is_done_by_the_tutorial
        or command.needs_a_run  # tests/runs/test_docs_after_a_run.py runs these
        or f"{command.line} ".startswith(tuple(f"{words} " for words in PARSED_ONLY))
        or command.page in ELSEWHERE
    )
]


@pytest.mark.parametrize("page", dict.fromkeys(command.page for command in RUN_HERE))
def test_the_commands_of_a_page_end_well(
    page: str, tmp_path: Path, install: Install, install_distributions: Callable[[str], None]
) -> None:
    """One after the other, in one folder; of training, everything but the training itself."""
    commands = [command for command in RUN_HERE if command.page == page]
    prepare(tmp_path, page, left_out=made_by(commands))
    install_example(ROOT / page, install)
    for command in commands:
        install_distributions(command.line)
        run(command)
        if command.words[:2] == ("plugins", "new"):  # which the page then installs
            install(tmp_path / f"grpox-{command.words[2]}")


def run(command: Command) -> None:
    trains, sweeps = command.words[0] == "train", command.words[0] == "sweep"
    words = [*command.words, *(["--dry-run"] if sweeps and "--dry-run" not in command.words else [])]
    with training_left_out() as trained:
        ended = invoke(words, command.ranks)
    assert ended.code == 0, f"{command.block.place}: grpox {command.line}\n{ended.output}{ended.errors}"
    assert len(trained) == trains
    if command.output:
        Path(command.output).write_text(ended.output, encoding="utf-8")
    if counted := re.search(rf"grpox {re.escape(command.line)} +# (\d+) checks", command.block.text):
        assert f"{counted[1]} passed" in ended.output
