"""The assets of the recipe lake: a model that walks straight into holes, and maps that it was not shown."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpox.runfile.recipes
from grpox_environments.configs import LakeConfig
from grpox_environments.lake import Lake, distances, find

FOLDER = Path(grpox.runfile.recipes.__file__).parent / "lake"
TURNS = 10


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(FOLDER / "model")


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(FOLDER / "model").eval()


def played(model: Any, tokenizer: Any, row: dict[str, str], sampled: bool = False) -> tuple[Lake, list[str]]:
    """Play an episode with the tokens of a run: each text by itself, an end token after each turn."""
    lake, states = Lake(LakeConfig(look=True, hint="")), []
    ids = tokenizer(row["prompt"])["input_ids"]
    view: str | None = lake.reset(row, 0)
    while view is not None and len(states) < TURNS:
        ids = [*ids, *tokenizer(view)["input_ids"]]
        states.append(lake.state_key())
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
        move = int(torch.multinomial(logits.softmax(-1), 1)) if sampled else int(logits.argmax())
        ids = [*ids, move, tokenizer.eos_token_id]
        view = lake.reply(tokenizer.decode([move]))
    return lake, states


def test_a_direction_is_one_token_and_so_is_a_cell(tokenizer: Any) -> None:
    text = "lake\n@.O\nG.#"
    assert len(tokenizer(text)["input_ids"]) == 1 + 1 + 3 + 1 + 3
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert [len(tokenizer(way)["input_ids"]) for way in ("up", "down", "left", "right")] == [1] * 4
    assert tokenizer.unk_token_id not in tokenizer(text + "up down".replace(" ", ""))["input_ids"]


def test_maps_are_held_out_and_all_can_be_crossed() -> None:
    train, heldout = ([row["map"] for row in read(name)] for name in ("train.jsonl", "heldout.jsonl"))
    assert (len(set(train)), len(set(heldout))) == (len(train), len(heldout)) == (6000, 300)
    assert not set(train) & set(heldout)
    for text in [*train[:200], *heldout]:
        rows = text.split("/")
        assert text.count("O") == 4
        assert distances(rows)[find(rows, "@")] >= 4


def test_the_base_model_names_directions_and_falls(model: Any, tokenizer: Any) -> None:
    lakes = [played(model, tokenizer, row)[0] for row in read("heldout.jsonl")[:60]]
    success = sum(lake.reward() for lake in lakes) / len(lakes)
    assert 0.2 <= success <= 0.55
    assert sum(bool(lake.info()["fell"]) for lake in lakes) / len(lakes) >= 0.4


def test_states_recur_in_a_group(model: Any, tokenizer: Any) -> None:
    torch.manual_seed(0)
    shared = turns = 0
    for row in read("train.jsonl")[:3]:
        counts = Counter(state for _ in range(8) for state in played(model, tokenizer, row, sampled=True)[1])
        turns += counts.total()
        shared += sum(count for count in counts.values() if count > 1)
    assert shared / turns >= 0.7
