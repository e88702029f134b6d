"""What grpox reads from others runs no code of theirs, and what it writes is for others to read at most."""

from __future__ import annotations

import ast
import json
import os
import pickle
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.handlers import handlers_kept

from grpox.cli.errors import run_command
from grpox.config import ModelConfig, RunConfig
from grpox.errors import ConfigError, RunFailed
from grpox.models import load_config, load_model, load_tokenizer
from grpox.observing.record import config_text
from grpox.whole_file import write_whole
from grpox_rewards.configs import RewardModelConfig
from grpox_rewards.reward_model import RewardModel

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "grpox" / "recipes" / "quickstart" / "model"
SOURCES = [*(ROOT / "grpox").rglob("*.py"), *(ROOT / "plugins" / "builtin").rglob("*.py")]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A copy of the quickstart's model."""
    return Path(shutil.copytree(MODEL, tmp_path / "model"))


def calls(name: str) -> Iterator[tuple[str, ast.Call]]:
    """Every call of `name` in grpox and its built-in plugins, with where it is."""
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == name:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_torch_reads_nothing_but_weights() -> None:
    found = list(calls("torch.load"))
    assert found
    for where, call in found:
        given = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        assert given.get("weights_only") == "True", where


WELL_KNOWN = {
    # From the trainer to a process of its own that calls a reward function, and back.
    "pickle.loads": {"grpox/rewards/process.py", "grpox/rewards/worker.py"},
    # Completions and their tests, in a process that is confined.
    "exec": {"plugins/builtin/grpox_rewards/code_judge.py"},
}


@pytest.mark.parametrize("name", ["pickle.load", "pickle.loads", "yaml.load", "eval", "exec", "os.system"])
def test_what_would_run_what_it_reads_is_used_where_that_is_meant_alone(name: str) -> None:
    assert {where.partition(":")[0] for where, _ in calls(name)} == WELL_KNOWN.get(name, set())


@pytest.mark.parametrize(
    ("section", "load"),
    [("AutoConfig", load_config), ("AutoModelForCausalLM", load_model), ("AutoTokenizer", load_tokenizer)],
)
def test_code_that_comes_with_a_model_is_refused_and_not_run(
    model: Path, section: str, load: Callable[[ModelConfig], object]
) -> None:
    (model / "theirs.py").write_text(f"import os\nos.mkdir({str(model / 'ran')!r})\n")
    file = model / ("tokenizer_config.json" if section == "AutoTokenizer" else "config.json")
    held = json.loads(file.read_text())
    held["auto_map"] = {section: ["theirs.Theirs", None] if section == "AutoTokenizer" else "theirs.Theirs"}
    # A kind that transformers does not know: there is nothing but their code to load it with.
    held |= {"model_type": "theirs"} if section == "AutoConfig" else {}
    held |= {"tokenizer_class": "TheirTokenizer"} if section == "AutoTokenizer" else {}
    file.write_text(json.dumps(held))
    try:
        load(ModelConfig(path=str(model)))
    except ConfigError as error:
        [problem] = error.problems
        assert problem.key == "model.init.trust_remote_code"
    else:
        assert section != "AutoConfig"  # transformers' own class was taken
    assert not (model / "ran").exists()


class Evil:
    def __init__(self, made: Path) -> None:
        self.made = made

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.made),)


def with_pickled_weights(model: Path, extra: object) -> None:
    """Put the model's weights into a .bin file, together with `extra`."""
    weights = load_file(model / "model.safetensors")
    (model / "model.safetensors").unlink()
    torch.save(weights | {"extra": extra}, model / "pytorch_model.bin")


def test_a_pickle_among_a_models_weights_is_refused_and_not_run(model: Path) -> None:
    with_pickled_weights(model, Evil(model / "ran"))
    with pytest.raises(ConfigError, match="model"):
        load_model(ModelConfig(path=str(model)))
    assert not (model / "ran").exists()
    with pytest.raises(ConfigError):
        RewardModel(RewardModelConfig(model=str(model)))
    assert not (model / "ran").exists()
    # The trap itself works: what reads it without care does run it.
    pickle.loads(pickle.dumps(Evil(model / "ran")))
    assert (model / "ran").exists()


def test_others_cannot_write_what_a_command_writes_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with handlers_kept():
            run_command(lambda _: write_whole(tmp_path / "run" / "config.yaml", "a: 1\n"), [])
    finally:
        os.umask(before)
    for path in (tmp_path / "run", tmp_path / "run" / "config.yaml"):
        assert stat.S_IMODE(path.stat().st_mode) & 0o022 == 0


def test_no_secret_is_in_the_record_of_a_run_or_on_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    config = RunConfig.model_validate(
        {
            "model": {"path": "m", "init": {"token": "hf_verysecret"}},
            "data": {"path": "d.jsonl"},
            "rewards": ["math"],
            "tracking": {"mlflow": {"tracking_uri": "https://me:hunter2@host/x"}},
        }
    )
    text = config_text(config)
    assert "verysecret" not in text
    assert "hunter2" not in text
    assert "https://me:***@host/x" in text

    def fail(_: list[str]) -> None:
        raise RunFailed("https://me:hunter2@host/x does not answer")

    with handlers_kept():
        assert run_command(fail, []) == 1
    told = capsys.readouterr().err
    assert "hunter2" not in told
    assert "host/x does not answer" in told
