"""grpox runs no code from files that it reads, and other users cannot write the files that it writes."""

from __future__ import annotations

import ast
import inspect
import json
import os
import pickle
import re
import shutil
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.handlers import handlers_kept
from support.problems import problem_of
from transformers import PreTrainedModel

from grpox.checkpoint.export import checkpoint_model, export_checkpoint
from grpox.checkpoint.folders import folder_of, write_manifest
from grpox.checkpoint.progress import Progress
from grpox.cli.errors import run_command
from grpox.config import ModelConfig, RunConfig
from grpox.errors import ConfigError, RunFailed
from grpox.observing.record import config_text
from grpox.policy.models import load_config, load_model, load_tokenizer
from grpox.runfile.load import load_run
from grpox.runfile.lock.of_run import lock_of
from grpox.runfile.model_options import HARMLESS
from grpox.runtime.files import write_atomically
from grpox.training.load_evaluation import load_evaluation, named_model
from grpox_rewards.configs import RewardModelConfig
from grpox_rewards.reward_model import RewardModel

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "grpox" / "runfile" / "recipes" / "quickstart" / "model"
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
    # Likewise to the process of an environment; what comes back is read without loading classes.
    "pickle.loads": {
        "grpox/rollout/episodes/episode_process.py",
        "grpox/rollout/episodes/forker.py",
        "grpox/rollout/episodes/loading.py",
        "grpox/rollout/rewards/process.py",
        "grpox/rollout/rewards/worker.py",
    },
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


@pytest.mark.parametrize("key", ["attn_implementation", "_attn_implementation"])
def test_a_models_configuration_has_no_code_fetched_from_a_hub(model: Path, key: str) -> None:
    file = model / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {key: "them/kernel"}))
    for load in (load_config, load_model):
        problem = problem_of(load, ModelConfig(path=str(model)))
        assert (problem.key, problem.given) == ("model.init.attn_implementation", str(model))
        assert "them/kernel" in problem.what
    eager = ModelConfig(path=str(model), init={"attn_implementation": "eager"})
    if key == "attn_implementation":
        load_model(eager)
    else:  # transformers takes it before what it is told
        with pytest.raises(ConfigError, match="them/kernel"):
            load_model(eager)
    assert load_config(ModelConfig(path=str(model), init={"attn_implementation": "them/kernel"}))
    file.write_text(json.dumps(json.loads(file.read_text()) | {"num_labels": 1}))
    with pytest.raises(ConfigError, match="code from a hub: the kernel them/kernel"):
        RewardModel(RewardModelConfig(model=str(model)))


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
            run_command(lambda _: write_atomically(tmp_path / "run" / "config.yaml", "a: 1\n"), [])
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


@pytest.fixture
def theirs(model: Path, tmp_path: Path) -> Path:
    """A checkpoint that says to trust the code that comes with its model, which leaves `tmp_path`/ran."""
    (model / "theirs.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    held = json.loads((model / "config.json").read_text())
    held |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.Theirs"}}
    (model / "config.json").write_text(json.dumps(held))
    (tmp_path / "rewards.py").write_text(f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\n")
    return checkpoint_with(tmp_path, {"path": str(model), "init": {"trust_remote_code": True}})


def checkpoint_with(folder: Path, model: dict[str, object]) -> Path:
    """A checkpoint that is whole but for its weights, with this section `model` and a reward in a file."""
    run = load_run("quickstart", ["evaluation=null"])
    config = run.config.model_dump(mode="json")
    config["model"] |= model
    config["rewards"] = [{"path": str(folder / "rewards.py"), "name": "r", "weight": 1.0}]
    made = folder_of(folder / "theirs", 3)
    made.mkdir(parents=True)
    told = {"step": 3, "world_size": 1, "num_tokens": 0, "seconds": 0, "metrics_bytes": 0, "data": {}}
    progress = Progress.model_validate(
        told | {"evaluation_before": {}, "metrics": {}, "config": config, "lock": lock_of(run)}
    )
    progress.write(made)
    write_manifest(made)
    return made


def test_a_checkpoint_does_not_say_whose_code_an_export_runs(theirs: Path, tmp_path: Path) -> None:
    for source in (theirs, theirs.parents[1]):
        problem = problem_of(export_checkpoint, source, tmp_path / "out")
        assert (problem.key, problem.given) == ("CHECKPOINT", str(theirs))
        assert "trust_remote_code" in problem.what
        assert "--trust-remote-code" in problem.allowed
    assert not (tmp_path / "ran").exists()
    # The trap itself works.
    with pytest.raises(ConfigError, match="cannot be loaded"):
        export_checkpoint(theirs, tmp_path / "out", trusts_code=True)
    assert (tmp_path / "ran").exists()


def test_a_checkpoint_does_not_say_whose_code_an_evaluation_runs(theirs: Path, tmp_path: Path) -> None:
    named = named_model(str(theirs))
    problem = problem_of(load_evaluation, named, "quickstart")
    assert (problem.key, problem.given) == ("model.init.trust_remote_code", str(theirs))
    assert "model.init.trust_remote_code=true" in problem.allowed
    allowed = load_evaluation(named, "quickstart", ["model.init.trust_remote_code=true"])
    assert allowed.config.model.init == {"trust_remote_code": True}
    # What is loaded is what the run file and its overrides say, whatever the checkpoint does.
    wary = ModelConfig(path=allowed.config.model.path)
    assert problem_of(checkpoint_model, theirs, wary).key == "model.init.trust_remote_code"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "init",
    [
        {"weights_only": None},
        {"use_kernels": True},
        {"allow_all_kernels": True},
        {"kernel_config": {"Linear": "them/kernel"}},
        {"attn_implementation": "them/kernel"},
        {"attn_implementation": {"text_config": "them/kernel"}},
        {"_attn_implementation": "them/kernel"},
    ],
    ids=str,
)
def test_nor_by_another_argument_that_runs_code_nor_by_pickled_weights(
    model: Path, tmp_path: Path, init: dict[str, object]
) -> None:
    with_pickled_weights(model, Evil(tmp_path / "ran"))
    checkpoint = checkpoint_with(tmp_path, {"path": str(model), "init": init})
    with pytest.raises(ConfigError, match="that may run code"):
        export_checkpoint(checkpoint, tmp_path / "out")
    with pytest.raises(ConfigError, match="that may run code"):
        load_evaluation(named_model(str(checkpoint)), "quickstart")
    assert not (tmp_path / "ran").exists()
    shutil.rmtree(tmp_path / "theirs")
    harmless = {"attn_implementation": "eager", "trust_remote_code": False, "weights_only": True}
    checkpoint = checkpoint_with(tmp_path, {"path": str(model), "init": harmless})
    with pytest.raises(ConfigError, match="cannot be loaded"):
        export_checkpoint(checkpoint, tmp_path / "out")
    assert not (tmp_path / "ran").exists()


def test_every_argument_of_from_pretrained_is_known_to_run_code_or_not() -> None:
    """One that a later transformers adds must be looked at: does it run code? Then it belongs to HARMLESS."""
    source = inspect.getsource(PreTrainedModel.from_pretrained)
    parameters = inspect.signature(PreTrainedModel.from_pretrained).parameters
    named = {*parameters, *re.findall(r'kwargs\.pop\(\s*"(\w+)"', source)}
    data = {
        "_commit_hash", "_from_auto", "_from_pipeline", "adapter_kwargs", "adapter_name", "args",
        "attn_implementation", "cache_dir", "cls", "config", "device_map", "device_mesh", "disable_mmap",
        "distributed_config", "dtype", "experts_implementation", "force_download", "fusion_config",
        "generation_config", "gguf_file", "ignore_mismatched_sizes", "key_mapping", "kwargs",
        "local_files_only", "max_memory", "model_args", "offload_buffers", "offload_folder",
        "output_loading_info", "pretrained_model_name_or_path", "proxies", "quantization_config", "revision",
        "state_dict", "subfolder", "token", "torch_dtype", "tp_plan", "tp_size", "tqdm_class",
        "use_safetensors", "variant",
    }  # fmt: skip
    assert named - data == HARMLESS.keys()
