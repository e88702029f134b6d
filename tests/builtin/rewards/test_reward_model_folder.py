"""A reward model's folder that cannot score is refused by the run file's check, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.problems import problem_of

from grpox.errors import ConfigError
from grpox.runfile.load import ResolvedRun, load_run
from grpox_rewards.configs import RewardModelConfig
from grpox_rewards.reward_model_folder import TOKENIZER

ONE = {"model_type": "llama", "id2label": {"0": "LABEL_0"}}


def write_folder(folder: Path, tokenizer: str = "tokenizer.json", **files: dict[str, Any]) -> str:
    """Write the files of a model or adapter, and an empty one of a tokenizer; return the folder."""
    folder.mkdir()
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    if tokenizer:
        (folder / tokenizer).touch()
    return str(folder)


@pytest.mark.parametrize(
    ("config", "is_refused"),
    [
        (ONE, False),
        ({"num_labels": 1}, False),
        ({"id2label": None, "num_labels": 1}, False),
        ({"id2label": {"0": "bad", "1": "good"}}, True),
        ({"id2label": {"0": "bad", "1": "good"}, "num_labels": 1}, False),
        ({"id2label": {"0": "score"}, "num_labels": 2}, True),
        ({"id2label": {}}, True),
        ({"model_type": "bart"}, True),
    ],
)
def test_the_number_of_outputs_is_that_of_transformers(
    config: dict[str, Any], is_refused: bool, tmp_path: Path
) -> None:
    from transformers import AutoConfig

    folder = write_folder(tmp_path / "judge", config={"model_type": "llama"} | config)
    assert (AutoConfig.from_pretrained(folder).num_labels != 1) == is_refused
    problems = RewardModelConfig(model=folder).check_files()
    assert [(each.key, each.given) for each in problems] == [("model", folder)] * is_refused
    assert all("id2label" in each.allowed for each in problems)


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({}, ""),
        ({"task_type": None}, ""),
        ({"base_model_name_or_path": "user/model"}, ""),
        ({"task_type": "CAUSAL_LM"}, "CAUSAL_LM"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path"),
        ({"base_model_name_or_path": "/no/such/folder"}, "/no/such/folder"),
    ],
)
def test_an_adapter_needs_a_head_and_a_base_model(changed: dict[str, Any], named: str, tmp_path: Path) -> None:
    """The base model is a language model, whose config.json names no labels."""
    base = write_folder(tmp_path / "base", config={"model_type": "llama"})
    adapter = {"task_type": "SEQ_CLS", "base_model_name_or_path": base} | changed
    folder = write_folder(tmp_path / "judge", adapter_config=adapter)
    problems = RewardModelConfig(model=folder).check_files()
    assert [(each.key, each.given) for each in problems] == [("model", folder)] * bool(named)
    assert all(named in f"{each.what} {each.allowed}" for each in problems)


def test_a_folder_needs_a_tokenizer_and_an_adapter_may_have_its_base_models(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "judge", tokenizer="", config=ONE)
    [problem] = RewardModelConfig(model=folder).check_files()
    assert (problem.key, problem.given) == ("model", folder)
    assert "'tokenizer'" in problem.allowed
    other = write_folder(tmp_path / "other", config=ONE)
    assert RewardModelConfig(model=folder, tokenizer=other).check_files() == []
    [problem] = RewardModelConfig(model=other, tokenizer=folder).check_files()
    assert (problem.key, problem.given) == ("tokenizer", folder)
    # A path that cannot be looked up is left to the check of paths.
    assert RewardModelConfig(model="/" + "m" * 300).check_files() == []
    # That of an adapter may be its base model's.
    base = write_folder(tmp_path / "base", tokenizer="", config=ONE)
    adapter = {"task_type": "SEQ_CLS", "base_model_name_or_path": base}
    folder = write_folder(tmp_path / "adapter", tokenizer="", adapter_config=adapter)
    [problem] = RewardModelConfig(model=folder).check_files()
    assert (problem.key, problem.given) == ("model", folder)
    assert base in problem.what
    (tmp_path / "base" / "vocab.txt").touch()
    assert RewardModelConfig(model=folder).check_files() == []


def test_files_of_tokenizers_of_transformers_are_known_and_no_others() -> None:
    known = "tokenizer.json tokenizer_config.json vocab.txt entity_vocab.json prophetnet.tokenizer spm.model "
    known += "source.spm bpe.codes qwen.tiktoken dict.txt merges.txt tekken.json fairseq-bpe.json"
    assert [name for name in known.split() if not TOKENIZER.fullmatch(name)] == []
    others = "config.json model.safetensors pytorch_model.bin generation_config.json README.md"
    assert [name for name in others.split() if TOKENIZER.fullmatch(name)] == []


def read(folder: Path, judge: str) -> ResolvedRun:
    """Read a run file whose only reward is the model in the folder `judge` beside it."""
    (folder / "train.jsonl").write_text('{"prompt": "a"}\n' * 8)
    (folder / "run.yaml").write_text(
        "model: {path: policy}\ndata: {path: train.jsonl}\ntracking: {}\nrewards:\n"
        f"  - {{name: reward_model, model: {judge}}}\n"
        "train: {max_steps: 1, num_generations: 2, per_device_train_batch_size: 2}\n"
    )
    return load_run(folder / "run.yaml", world_size=1)


def test_a_run_file_names_the_reward_and_its_line(tmp_path: Path) -> None:
    write_folder(tmp_path / "policy", config={"model_type": "llama"})
    judge = write_folder(tmp_path / "judge", tokenizer="", config={"id2label": {"0": "a", "1": "b"}})
    with pytest.raises(ConfigError) as refused:
        read(tmp_path, "judge")
    assert [(each.key, each.given, each.where) for each in refused.value.problems] == [
        ("rewards[0].model", judge, f"{tmp_path / 'run.yaml'}:5")
    ] * 2
    write_folder(tmp_path / "sound", config=ONE)
    assert read(tmp_path, "sound").components["rewards[0]"].label == "reward_model"


def test_the_folder_of_another_tokenizer_needs_no_model(tmp_path: Path) -> None:
    write_folder(tmp_path / "policy", config={"model_type": "llama"})
    write_folder(tmp_path / "judge", tokenizer="", config=ONE)
    other = write_folder(tmp_path / "other")
    bound = read(tmp_path, "judge, tokenizer: other").components["rewards[0]"]
    assert bound.config is not None
    assert bound.config.model_dump()["tokenizer"] == other
    for name in ("train.jsonl", "nothing"):
        problem = problem_of(read, tmp_path, f"judge, tokenizer: {name}")
        assert (problem.key, problem.given) == ("rewards[0].tokenizer", str(tmp_path / name))
