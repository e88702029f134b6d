"""A run file's problems: each with its line, key, what was given and the nearest name, all at once."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pytest
from support.problems import refused
from support.run_checks import refused_quickstart

from grpox.config import RunConfig
from grpox.errors import Problem
from grpox.runfile.load import ResolvedRun, load_run, resolve_config
from grpox.runfile.overrides import Origin

RUN = """\
model: {path: model}
data:
  path: train.jsonl
rewards:
  - exact
loss: {name: dapo, clip_high: 0.28}
train:
  per_device_train_batch_size: 8
  num_generations: 4
  learning_rate: 1e-6
evaluation: {path: heldout.csv}
"""

OTHER_ENGINE = """
from grpox import ComponentSpec, hookimpl

@hookimpl
def grpox_generators():
    return [ComponentSpec("other", "grpox_other:Other", provides=("logprobs", "other-numerics"))]
"""

Load = Callable[..., ResolvedRun]
Refuse = Callable[..., list[Problem]]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Load:
    """``load(old, new, *overrides)``: the run of `RUN` with `old` replaced by `new`; its inputs are there."""
    folder = tmp_path / "inputs"
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text("{}")
    record = json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n"
    (folder / "train.jsonl").write_text("\n" + record * 9)
    (folder / "heldout.csv").write_text("prompt,answer\n1+1=,2\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def run(old: str = "", new: str = "", *overrides: str, **options: Any) -> ResolvedRun:
        assert old in RUN
        (folder / "run.yaml").write_text(RUN.replace(old, new, 1) if old else RUN + new)
        return load_run("inputs/run.yaml", overrides, **options)

    return run


@pytest.fixture
def refuse(load: Load) -> Refuse:
    return partial(refused, load)


def told(problem: Problem) -> tuple[str, str, str]:
    return problem.where.removeprefix("inputs/"), problem.key, problem.nearest


def test_a_run_holds_every_selected_component_under_its_key(load: Load) -> None:
    run = load()
    names = {key: bound.label for key, bound in run.components.items()}
    assert names == {
        "generator": "hf", "advantage": "group", "loss": "dapo", "correction": "none",
        "rewards[0]": "exact", "tracking.mlflow": "mlflow",
    }  # fmt: skip
    assert run.components["loss"].config.clip_high == 0.28  # type: ignore[union-attr]
    assert run.distributions == ["grpox"]
    assert (run.plan.prompts_per_generation, run.num_prompts, run.config.train.learning_rate) == (2, 9, 1e-6)
    # Rewards of one name are told apart.
    regex = "{name: regex, pattern: a}"
    run = load(
        "  - exact\n", f"  - {regex}\n  - exact\n  - {regex}\n  - {regex}\n", "evaluation.accuracy=regex-2"
    )
    assert run.config.reward_labels == ["regex", "exact", "regex-2", "regex-3"]


@pytest.mark.parametrize("text", ["no", "2026-01-31", "1_0", "12:30:45"])
def test_text_and_headings_are_what_they_are_in_yaml_1_2(load: Load, text: str) -> None:
    assert load("", f"output_dir: {text}\n").config.output_dir == text
    # A heading alone is an empty section.
    run = load("", "sampling:\n  # temperature: 0.7\ntracking:\n  mlflow:\n")
    assert run.config.sampling.temperature == 1.0
    assert "tracking.mlflow" in run.components


def test_paths_in_the_file_start_from_its_folder_and_others_from_the_working_directory(
    load: Load, tmp_path: Path
) -> None:
    inputs = tmp_path / "inputs"
    config = load("", "output_dir: out\n").config
    assert config.model.path == str(inputs / "model")
    assert config.data.path == str(inputs / "train.jsonl")
    assert config.evaluation is not None
    assert config.evaluation.path == str(inputs / "heldout.csv")
    assert config.output_dir == "out"
    (tmp_path / "other.csv").write_text("prompt,answer\n" + "1+1=,2\n" * 4)
    for override in ("data.path=other.csv", "data={path: other.csv}"):
        assert load("", "", override).config.data.path == str(tmp_path / "other.csv")


def test_components_by_path_start_from_the_run_file(load: Load, tmp_path: Path) -> None:
    inputs = tmp_path / "inputs"
    (inputs / "mine.py").write_text("def short(completions, **columns):\n    return [0.0]\n")
    run = load("  - exact", "  - {path: mine.py:short, weight: 2}")
    assert run.config.rewards[0].path == f"{inputs / 'mine.py'}:short"
    assert run.components["rewards[0]"].label == "short"
    (inputs / "watch.py").write_text("class Watch:\n    pass\n")  # an observer, under any heading
    run = load("", "tracking: {mine: {path: watch.py:Watch}}\n")
    assert type(run.build("tracking.mine")).__name__ == "Watch"
    assert run.config.tracking["mine"]["path"] == f"{inputs / 'watch.py'}:Watch"


def test_checking_a_run_and_its_lock_imports_nothing_heavy(load: Load) -> None:
    load()
    code = (
        "import sys; from grpox.runfile.load import load_run; from grpox.runfile.lock.of_run import lock_of; "
        "lock_of(load_run('inputs/run.yaml')); "
        "print({'torch', 'transformers', 'deepspeed', 'datasets', 'mlflow', 'pyarrow'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_a_run_from_python_leaves_its_config_alone(load: Load, tmp_path: Path) -> None:
    load()
    data = {"model": {"path": "model"}, "data": {"path": "train.jsonl"}, "rewards": ["exact"]}
    config = RunConfig.model_validate(data)
    for given in (config, data):
        run = resolve_config(given, tmp_path / "inputs", "python")
        assert run.config.model.path == str(tmp_path / "inputs" / "model")
        assert run.source == "python"
    assert config.model.path == "model"
    assert data["model"] == {"path": "model"}


def test_overrides_reach_into_sections_lists_and_shorthands_and_the_last_wins(
    load: Load, refuse: Refuse
) -> None:
    run = load(
        "loss: {name: dapo, clip_high: 0.28}", "loss: grpo", "train.max_steps=3", "train.max_steps=7",
        "rewards.0.weight=2", "rewards.1=math", "rewards[1].weight=-0.5", "loss.clip_high=0.4",
        "train.learning_rate=2e-5", "advantage.eps=0.01", "sampling.temperature=0.5",
    )  # fmt: skip
    assert run.config.train.max_steps == 7
    assert run.config.train.learning_rate == 2e-5
    rewards = [(reward.label, reward.weight) for reward in run.config.rewards]
    assert rewards == [("exact", 2.0), ("math", -0.5)]
    assert (run.config.loss.name, run.config.loss.params) == ("grpo", {"clip_high": 0.4})
    assert (run.config.advantage.name, run.config.advantage.params) == ("group", {"eps": 0.01})
    assert load("", "", "loss=cispo").config.loss.params == {}
    assert len(refuse("", "", "one", "rewards.9=exact")) == 2


# -- The schema ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "where", "key", "nearest", "allowed"),
    [
        ("num_generations: 4", "num_generation: 4", 9, "train.num_generation", "num_generations", "max_steps"),
        ("train:", "trian:", 7, "trian", "train", "model, data, "),
        ("", "learning_rate: 1\n", 12, "learning_rate", "train.learning_rate", "model, data, "),
        ("num_generations: 4", "num_generations: four", 9, "train.num_generations", "", "integer >= 2"),
        (
            "{path: model}",
            "{path: model, dtype: bfloat}",
            1,
            "model.dtype",
            "bfloat16",
            "auto or float32 or b",
        ),
        ("{path: model}", "{}", 1, "model.path", "", "text"),
        ("  path: train.jsonl", "  prompt_column: q", 2, "data", "", "mapping with path, subset"),
        ("- exact", "- {weight: 2}", 5, "rewards[0]", "", ""),
        ("- exact", "- {name: exact, weight: big}", 5, "rewards[0].weight", "", "number"),
        ("  - exact", "  []", 4, "rewards", "", "list of mapping"),
        ("", "sampling: {min_completion_length: 999}\n", 12, "sampling", "", "mapping with"),
        ("{name: dapo, clip_high: 0.28}", "[dapo]", 6, "loss", "", "mapping with name, path"),
    ],
)
def test_what_does_not_fit_the_schema(
    refuse: Refuse, old: str, new: str, where: int, key: str, nearest: str, allowed: str
) -> None:
    [problem] = refuse(old, new)
    assert told(problem) == (f"run.yaml:{where}", key, nearest)
    assert problem.allowed.startswith(allowed)


def test_schema_problems_come_first_in_the_order_of_their_lines(refuse: Refuse) -> None:
    new = "num_generations: 1\n  beta: -1\nlearning_rate: 3\n"
    problems = refuse("num_generations: 4\n", new + "evaluation2: {}\ntrain2:\n", "sampling.top_k=-1")
    assert [problem.key for problem in problems] == [
        "train.num_generations", "train.beta", "learning_rate", "evaluation2", "train2", "sampling.top_k",
    ]  # fmt: skip
    # All others come together after them.
    schema = {
        "loss.clip_hihg": "1", "train.beta": "-1", "sampling.top_p": "true", "rewards.1": "exat",
        "tracking.mine.name": "mlflow",
    }  # fmt: skip
    others = {"data.path": "none.jsonl", "train.num_generations": "3", "correction": "token-truncate"}
    more = [f"{key}={value}" for key, value in others.items()] + ["sampling.top_k=3"]
    problems = refuse("", "", *(f"{key}={value}" for key, value in schema.items()), *more)
    assert {problem.key.replace("[1]", ".1") for problem in problems} == set(schema)
    assert {problem.key for problem in refuse("", "", *more)} == set(others)


# -- Components ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "where", "key", "nearest"),
    [
        ("name: dapo", "name: dapoo", 6, "loss", "dapo"),
        ("clip_high", "clip_hihg", 6, "loss.clip_hihg", "clip_high"),
        ("clip_high: 0.28", "clip_high: wide", 6, "loss.clip_high", ""),
        ("- exact", "- exakt", 5, "rewards[0]", "exact"),
        ("- exact", "- name: exact\n    colum: a", 6, "rewards[0].colum", "column"),
        ("", "tracking: {mlfow: {}}\n", 12, "tracking.mlfow", "mlflow"),
        ("", "tracking: {mlflow: {experimnt: a}}\n", 12, "tracking.mlflow.experimnt", "experiment"),
        ("", "plugins: {required: [grpox-absent>=1]}\n", 12, "plugins.required[0]", ""),
        ("", "tracking: {mine: {name: mlflow}}\n", 12, "tracking.mine.name", ""),
        ("", "tracking: {mine: {name: none}}\n", 12, "tracking.mine.name", ""),
        ("", "tracking: {mine: {path: 3}}\n", 12, "tracking.mine.path", ""),
    ],
)
def test_what_is_wrong_with_components(
    refuse: Refuse, old: str, new: str, where: int, key: str, nearest: str
) -> None:
    [problem] = refuse(old, new)
    assert told(problem) == (f"run.yaml:{where}", key, nearest)


def test_a_component_whose_needs_nothing_meets_is_refused(refuse: Refuse, load: Load, tmp_path: Path) -> None:
    contract = "from grpox.contracts import Reduction\nclass %s:\n    reduction = Reduction.TOKEN_MEAN\n"
    contract += "    def per_token(self, inputs): ...\n"
    source = contract % "Needy" + "    needs = ('attention_weights',)\n"
    (tmp_path / "inputs" / "needy.py").write_text(source)
    [problem] = refuse("{name: dapo, clip_high: 0.28}", "{path: needy.py:Needy}")
    assert told(problem)[:2] == ("run.yaml:6", "loss")
    assert "needs 'attention_weights'" in problem.what
    source = contract % "Met" + "    needs = ('logprobs', 'entropy')\n"
    (tmp_path / "inputs" / "met.py").write_text(source)
    assert load("{name: dapo, clip_high: 0.28}", "{path: met.py:Met}")


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("train.ref_model_mixup_alpha", "train.ref_sync_alpha"),
        ("train.loss_type", "loss"),
        ("num_train_epochs", "train.num_train_epochs"),
        ("reward_funcs", "rewards"),
        ("args", "train"),
        ("vllm_gpu_memory_utilization", "generator.gpu_memory_utilization"),
        ("train.lr", "learning_rate"),
        ("alarms.kl", "kl_runaway"),
        ("model.temperature", "sampling.temperature"),
    ],
)
def test_an_unknown_key_is_answered_with_ours_also_where_it_is_trls(
    refuse: Refuse, key: str, near: str
) -> None:
    (problem,) = refuse("", "", f"{key}=2")
    assert (problem.key, problem.what, problem.nearest) == (key, "unknown key", near)


@pytest.mark.parametrize(
    ("overrides", "correction"),
    [
        ([], "token-truncate"),
        (["correction=none"], "none"),
        (["sampling.top_p=0.8"], "none"),  # it would be biased, and nobody asked for it
        (["train.old_logprobs=generator"], "none"),
    ],
)
def test_a_generator_with_numbers_of_its_own_is_corrected_for_unless_the_run_says_otherwise(
    load: Load, make_distribution: Callable[..., Path], overrides: list[str], correction: str
) -> None:
    make_distribution("grpox-other", OTHER_ENGINE)
    assert load("", "generator: other\n", *overrides).config.correction.name == correction
    assert load().config.correction.name == "none"


@pytest.mark.parametrize(
    ("sampling", "given"),
    [
        ("{repetition_penalty: 1.2}", "repetition_penalty 1.2"),
        ("{min_completion_length: 3}", "min_completion_length 3"),
        ("{generation_kwargs: {suppress_tokens: [3]}}", "generation_kwargs.suppress_tokens"),
    ],
)
def test_a_correction_is_refused_with_sampling_from_a_changed_distribution(
    refuse: Refuse, load: Load, sampling: str, given: str
) -> None:
    (problem,) = refuse("", f"correction: token-truncate\nsampling: {sampling}\n")
    assert (problem.key, problem.given) == ("correction", f"sampling with {given}")
    assert load("", f"sampling: {sampling}\n")
    assert load("", "correction: token-truncate\nsampling: {stop: [END], stop_token_ids: [3]}\n")


def test_a_generator_refuses_sampling_and_parameters_that_it_cannot_honour(refuse: Refuse) -> None:
    problems = refuse(
        "",
        "generator: {name: hf, continuous_batching: true}\n"
        "sampling: {stop: [END], generation_kwargs: {max_new_tokens: 9}}\n",
    )
    keys = [problem.key for problem in problems]
    assert keys == ["sampling.generation_kwargs.max_new_tokens", "sampling.stop", "sampling.generation_kwargs"]
    assert problems[0].nearest == "sampling.max_completion_length"
    assert all("run.yaml:13" in problem.where for problem in problems)
    (problem,) = refuse("", "generator: {name: hf, continuous_batching: true, gather_weights: false}\n")
    assert problem.key == "generator"
    assert "continuous_batching" in str(problem)
    assert "gather_weights" in str(problem)


# -- Files -----------------------------------------------------------------------------------------------


def write(path: Path, columns: tuple[str, ...], records: int) -> None:
    rows = datasets.Dataset.from_list([dict.fromkeys(columns, "x\ny")] * records)
    if path.suffix.startswith(".json"):
        rows.to_json(path, lines=path.suffix == ".jsonl")
    else:
        (rows.to_csv if path.suffix == ".csv" else rows.to_parquet)(path)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".parquet"])
def test_columns_and_records_of_each_kind_of_file(
    load: Load, refuse: Refuse, tmp_path: Path, suffix: str
) -> None:
    path = tmp_path / "inputs" / f"data{suffix}"
    write(path, ("prompt", "answer"), 3)
    assert load("train.jsonl", path.name).num_prompts == 3
    write(path, ("promt", "answer"), 3)
    [problem] = refuse("train.jsonl", path.name)
    assert told(problem)[1:] == ("data.prompt_column", "promt")
    assert (problem.given, problem.allowed) == ("prompt", "promt, answer")
    if suffix == ".json":  # may hold one record a line
        path.write_text('{"prompt": "a", "answer": "1"}\n{"prompt": "b"}\n')
        assert load("train.jsonl", path.name).num_prompts == 2


def test_batches_fit_the_ranks_of_the_launch_or_as_asked(
    load: Load, refuse: Refuse, monkeypatch: pytest.MonkeyPatch
) -> None:
    [problem] = refuse("num_generations: 4", "num_generations: 3")
    assert told(problem) == ("run.yaml:9", "train.num_generations", "2 or 4")
    size = "per_device_train_batch_size: "
    refuse(f"{size}8", f"{size}1")
    assert load(f"{size}8", f"{size}1", world_size=4).plan.world_size == 4
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert load(f"{size}8", f"{size}1").plan.world_size == 8


LINES = {"model": 1, "model.path": 1, "train": 3, "train.beta": 4, "rewards": 6, "rewards[0]": 7}


@pytest.mark.parametrize(
    ("overridden", "key", "where"),
    [
        # The file has no foo: only the override made it.
        (["foo.bar"], "foo", "command line"),
        (["foo.bar"], "foo.bar", "command line"),
        # What such a section lacks is missing on the command line too.
        (["evaluation.every"], "evaluation.path", "command line"),
        (["train.optimizer.lr"], "train.optimizer", "command line"),
        (["rewards[1].weight"], "rewards[1]", "command line"),
        # The file has the section: an override of one of its keys answers for that key alone.
        (["train.max_steps"], "train", "run.yaml:3"),
        (["train.max_steps"], "train.beta", "run.yaml:4"),
        (["rewards[1].weight"], "rewards[0]", "run.yaml:7"),
        # A name that merely begins alike is another key.
        (["foo.bar"], "fo", "run.yaml"),
        (["train.optimizer_x"], "train.optimizer", "run.yaml:3"),
        # The section was replaced as a whole.
        (["train"], "train.beta", "command line"),
    ],
)
def test_where_a_key_was_written(overridden: list[str], key: str, where: str) -> None:
    assert Origin("run.yaml", Path("/inputs"), LINES, overridden).where(key) == where


def test_problems_are_placed_and_those_of_the_command_line_come_last() -> None:
    origin = Origin("run.yaml", Path("/inputs"), LINES, ["foo.bar"])
    placed = origin.place([Problem("unknown key", key="foo"), Problem("too small", key="train.beta")])
    assert [problem.key for problem in placed] == ["train.beta", "foo"]
    assert [problem.where for problem in placed] == ["run.yaml:4", "command line"]
    [problem] = refused_quickstart("trian.max_steps=3")
    assert (problem.where, problem.key, problem.nearest) == ("command line", "trian", "train")
