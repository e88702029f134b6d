"""The README's own examples, taken from its text."""

import json
import re
import shlex
import shutil
from pathlib import Path

import yaml
from support import processes

README = (Path(__file__).parents[2] / "README.md").read_text()


def block(language, contains):
    """The README's code block in `language` that contains a text."""
    (found,) = [code for code in re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL) if contains in code]
    return found


def test_the_loss_in_15_lines_trains(grpox, folder):
    code = block("python", "class Reinforce")
    assert len(code.splitlines()) <= 15
    (folder / "my_loss.py").write_text(code)
    done = grpox(
        "train",
        "quickstart",
        "loss={path: my_loss.py:Reinforce}",
        "train.max_steps=1",
        "evaluation=null",
        "tracking={}",
        "output_dir=runs/loss",
    )
    assert done.returncode == 0, done.stderr
    metrics = json.loads((folder / "runs" / "loss" / "metrics.jsonl").read_text())["metrics"]
    assert metrics["reinforce/ratio_mean"] == 1


def test_the_python_example_trains_on_the_example_run_file(grpox, folder):
    """The run file needs a model and data of the user's: the quickstart's stand in for them."""
    assert grpox("recipes", "copy", "quickstart").returncode == 0
    run = yaml.safe_load(block("yaml", "# run.yaml"))
    run |= {
        "model": {"path": "quickstart/model"},
        "data": {"path": "quickstart/train.jsonl"},
        "sampling": {"max_completion_length": 4},
        "tracking": {},
    }
    (folder / "run.yaml").write_text(yaml.safe_dump(run))
    (folder / "rewards.py").write_text(
        "def is_short(completions, **columns):\n    return [1.0] * len(completions)\n"
    )
    script = block("python", "from grpox import train").replace("mine/run.yaml", "run.yaml")
    done = processes.run("-c", script, cwd=folder)
    assert done.returncode == 0, done.stderr
    lines = (folder / run["output_dir"] / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line)["metrics"] for line in lines]
    assert [step["rewards/is_short/mean"] for step in steps] == [1, 1, 1]
    assert "rewards/math/mean" not in steps[0]


def test_a_run_is_begun_checked_and_trained_as_the_commands_stand(grpox, folder):
    (script,) = [code for code in README.split("```")[1::2] if "grpox init mine" in code]
    commands = script.strip().splitlines()
    assert len(commands) == 7
    shutil.rmtree(folder / "quickstart", ignore_errors=True)  # another example of the page copies it too
    (folder / "quickstart.yaml").unlink(missing_ok=True)
    for command in commands:
        *launcher, _, words = command.partition("grpox ")
        done = grpox(*shlex.split(words, comments=True), ranks=2 if "torchrun" in launcher[0] else 1)
        assert done.returncode == 0, (command, done.stderr)
    assert json.loads((folder / "runs" / "mine" / "summary.json").read_text())["steps"] == 3


def test_the_example_run_file_is_valid_once_its_files_are_there(grpox, folder):
    done = grpox("validate", "run.yaml", "train.num_generations=8")
    assert done.returncode == 0, done.stderr
