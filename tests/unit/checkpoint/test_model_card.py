"""The card of a saved model: what it was trained from and on, how, and what became of it."""

from __future__ import annotations

from typing import Any

import yaml

from grpox.checkpoint.save_model import model_card
from grpox.config import RunConfig

SUMMARY = {"steps": 40, "accuracy_before": 0.25, "accuracy_after": 0.75}
DIGEST = "0123456789abcdef" * 4


def config(**changes: Any) -> RunConfig:
    given = {
        "model": {"path": "/home/ada/models/base"},
        "data": {"path": "/data/sets/train.jsonl"},
        "evaluation": {"path": "/data/sets/heldout.jsonl"},
        "rewards": ["exact", {"path": "/home/ada/rewards.py:short", "weight": 0.5}],
        "output_dir": "/scratch/ada/adder",
        **changes,
    }
    return RunConfig.model_validate(given)


def rows(card: str) -> dict[str, str]:
    cells = [line.strip("| ").split(" | ") for line in card.splitlines() if line.startswith("| ")]
    return {row[0]: row[1] for row in cells if len(row) == 2}


def test_data_are_told_with_their_digest_and_metrics_with_their_value() -> None:
    fingerprints = {"data.path": DIGEST, "evaluation.path": f"9000 {DIGEST[::-1]}", "model.path": "f"}
    metrics = {"reward": 0.51234, "grad_norm": 1.0, "memory/peak_gib": 3.0, "evaluation/accuracy": 0.75}
    told = rows(model_card(config(), SUMMARY, fingerprints, metrics))
    assert told["data"] == "train.jsonl (sha256 0123456789abcdef)"
    assert told["evaluated on"] == "heldout.jsonl (sha256 fedcba9876543210)"
    assert (told["reward"], told["grad_norm"], told["evaluation/accuracy"]) == ("0.5123", "1", "0.75")
    assert "memory/peak_gib" not in told
    assert told["optimizer steps"] == "40"
    assert (told["accuracy before"], told["accuracy after"]) == ("0.2500", "0.7500")
    assert told["rewards"] == "exact (weight 1), short (weight 0.5)"
    assert (told["base model"], told["loss"]) == ("base", "dapo")


def test_the_run_file_is_whole_and_names_no_folder_of_this_machine() -> None:
    card = model_card(config(), SUMMARY)
    shown = yaml.safe_load(card.partition("```yaml\n")[2].partition("```")[0])
    assert shown["train"] == config().model_dump(mode="json")["train"]
    assert shown["data"]["path"] == "train.jsonl"
    assert shown["rewards"][1]["path"] == "rewards.py:short"
    for folder in ("/home", "/data", "/scratch"):
        assert folder not in card
    assert "# adder\n" in card


def test_a_secret_of_the_config_is_no_part_of_it() -> None:
    card = model_card(config(generator={"name": "mine", "api_key": "hush"}), SUMMARY)
    assert "hush" not in card


def test_a_model_given_in_python_is_no_name_on_the_hub() -> None:
    front = model_card(config(model={"path": "(given in Python)"}), SUMMARY).split("---\n")[1]
    assert "base_model" not in yaml.safe_load(front)
    assert yaml.safe_load(model_card(config(model={"path": "org/base"}), SUMMARY).split("---\n")[1])[
        "base_model"
    ] == ("org/base")


def test_without_metrics_there_is_no_heading_for_them() -> None:
    card = model_card(config(), SUMMARY)
    assert "## Metrics" not in card
    assert "## Run file" in card
    assert "\n\n\n" not in card
