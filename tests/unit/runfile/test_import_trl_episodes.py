"""Tools and environments of scripts for TRL become keys of a run file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from grpox.cli.import_trl import import_trl
from grpox.runfile.load import load_run
from grpox.runfile.yaml_lines import read_yaml

SCRIPT = """\
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
{imports}

class Counter:
    def reset(self, **row): ...

    def count(self, number: int) -> str:
        '''Count.

        Args:
            number: how far.
        '''
        return str(number)
{reward}

def main():
    trainer = GRPOTrainer(
        model="org/model",
        {arguments}
        args=GRPOConfig({fields}),
        train_dataset=load_dataset("org/data"),
    )
    trainer.train()


if __name__ == "__main__":
    main()
"""
TOOLS = """\
def add(a: int, b: int) -> int:
    '''Add two numbers.

    Args:
        a: the first.
        b: the second.
    '''
    return a + b
"""
GET_REWARD = """
    def get_reward(self) -> float:
        return 1.0
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def imported(arguments: str, fields: str = "", reward: str = "", imports: str = "") -> dict[str, Any]:
    text = SCRIPT.format(arguments=arguments, fields=fields, reward=reward, imports=imports)
    Path("train.py").write_text(text)
    import_trl(Path("train.py"), Path("run.yaml"), force=True)
    data: dict[str, Any] = read_yaml(Path("run.yaml").read_text(), "run.yaml").data
    return data


def test_tools_of_a_file_and_the_number_of_turns(folder: Path) -> None:
    Path("tools.py").write_text(TOOLS)
    own = "reward_funcs='org/judge', tools=[add],"
    run = imported(own, "max_tool_calling_iterations=3", imports="from tools import add")
    assert run["tools"] == ["tools.py:add"]
    assert run["episodes"] == {"max_turns": 4}
    assert load_run("run.yaml", world_size=1).config.tools == [f"{folder}/tools.py:add"]


def test_an_environment_of_the_script_that_scores_itself(folder: Path) -> None:
    run = imported("environment_factory=Counter,", reward=GET_REWARD)
    assert run["environment"] == {"path": "train.py:Counter"}
    assert run["rewards"] == [{"name": "environment"}]


def test_an_environment_that_does_not(folder: Path) -> None:
    run = imported("reward_funcs='org/judge', environment_factory=Counter,")
    assert run["rewards"] == [{"name": "reward_model", "model": "org/judge"}]


def test_several_environments_by_the_column_environment(folder: Path) -> None:
    for name in ("chess", "go"):
        Path(f"{name}.py").write_text(f"class {name.title()}:\n    def reset(self, **row): ...\n")
    run = imported(
        "reward_funcs='org/judge', environment_factory={'chess': Chess, 'go': Go},",
        imports="from chess import Chess\nfrom go import Go",
    )
    assert run["environment"] == [
        {"path": "chess.py:Chess", "when": {"column": "environment", "is": "chess"}},
        {"path": "go.py:Go", "when": {"column": "environment", "is": "go"}},
    ]
    # A class that the script does not show may have get_reward.
    assert {"name": "environment"} in run["rewards"]


@pytest.mark.parametrize(
    ("arguments", "blank"),
    [
        ("environment_factory=lambda: Counter(),", "# environment: {path: 'environment.py:Name'}"),
        ("tools=make_tools(),", "# tools: ['tools.py:name']"),
        ("tools=[lambda a: a],", "# tools: ['tools.py:name']"),
    ],
)
def test_what_the_script_does_not_show_is_left_to_the_user(folder: Path, arguments: str, blank: str) -> None:
    run = imported(f"reward_funcs='org/judge', {arguments}")
    assert "environment" not in run
    assert "tools" not in run
    assert blank in Path("run.yaml").read_text()
