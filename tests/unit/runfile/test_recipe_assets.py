"""The assets of the recipes: models that err in a known way, and data that they were not shown."""

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

RECIPES = Path(grpox.runfile.recipes.__file__).parent
CHARACTERS = "0123456789+-*="
TURNS = 10


def read(recipe: str, name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (RECIPES / recipe / name).read_text(encoding="utf-8").splitlines()]


def loaded(recipe: str) -> tuple[Any, Any]:
    """Load the model of a recipe, and its tokenizer."""
    folder = RECIPES / recipe / "model"
    return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize(("recipe", "most"), [("quickstart", 4_000_000), ("lake", 2_000_000)])
def test_the_folder_of_a_recipe_stays_small_enough_for_a_wheel(recipe: str, most: int) -> None:
    files = [path for path in (RECIPES / recipe).rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files if "__pycache__" not in path.parts) <= most


# -- The quickstart: sums of two digits ------------------------------------------------------------------


def digits(prompt: str) -> tuple[int, int, int, int]:
    """Return the tens and ones of both numbers."""
    a, b = map(int, prompt.rstrip("=").split("+"))
    return a // 10, a % 10, b // 10, b % 10


def test_the_quickstarts_model_and_tokenizer() -> None:
    model, tokenizer = loaded("quickstart")
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert len(ids) == len(set(ids)) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    eos = [tokenizer.eos_token_id]
    assert tokenizer.decode(tokenizer("85")["input_ids"] + eos, skip_special_tokens=True) == "85"
    assert tokenizer("3 x")["input_ids"][1:] == [tokenizer.unk_token_id] * 2
    saved = json.loads((RECIPES / "quickstart" / "model" / "tokenizer.json").read_text(encoding="utf-8"))
    built = json.loads(tokenizer.backend_tokenizer.to_str())
    for part in ("normalizer", "pre_tokenizer", "decoder", "model"):
        assert built[part] == saved[part]
    assert tokenizer.padding_side == "left"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3
    defaults = json.loads((RECIPES / "quickstart" / "model" / "generation_config.json").read_text())
    del defaults["transformers_version"]  # else they say where to end alone, and not to sample
    assert defaults == {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert 500_000 <= model.num_parameters() <= 1_000_000
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_train_and_held_out_are_the_sums_of_all_ordered_pairs_without_overlap() -> None:
    train, held_out = (read("quickstart", name) for name in ("train.jsonl", "heldout.jsonl"))
    assert (len(train), len(held_out)) == (9500, 500)
    every = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(100) for b in range(100)]
    assert sorted(train + held_out, key=str) == sorted(every, key=str)


def test_the_base_model_adds_but_forgets_to_carry() -> None:
    model, tokenizer = loaded("quickstart")
    rows = read("quickstart", "heldout.jsonl")
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right: dict[bool, list[bool]] = {True: [], False: []}
    for row, text in zip(rows, texts, strict=True):
        tens, ones, more_tens, more_ones = digits(row["prompt"])
        right[ones + more_ones > 9 or tens + more_tens > 9].append(text == row["answer"])
        # Its mistakes are sums without a carry.
        assert int(text) in (int(row["answer"]), (tens + more_tens) % 10 * 10 + (ones + more_ones) % 10)
    assert 0.2 <= sum(right[True] + right[False]) / len(rows) <= 0.4
    assert sum(right[False]) / len(right[False]) >= 0.95
    assert sum(right[True]) / len(right[True]) <= 0.05


# -- The lake --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def lake() -> tuple[Any, Any]:
    return loaded("lake")


def played(loaded: tuple[Any, Any], row: dict[str, str], sampled: bool = False) -> tuple[Lake, list[str]]:
    """Play an episode with the tokens of a run: each text by itself, an end token after each turn."""
    (model, tokenizer), lake, states = loaded, Lake(LakeConfig(look=True, hint="")), []
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


def test_the_lakes_model_names_directions_and_falls(lake: tuple[Any, Any]) -> None:
    tokenizer, text = lake[1], "lake\n@.O\nG.#"
    assert len(tokenizer(text)["input_ids"]) == 1 + 1 + 3 + 1 + 3
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert [len(tokenizer(way)["input_ids"]) for way in ("up", "down", "left", "right")] == [1] * 4
    assert tokenizer.unk_token_id not in tokenizer(text + "up down".replace(" ", ""))["input_ids"]
    lakes = [played(lake, row)[0] for row in read("lake", "heldout.jsonl")[:60]]
    success = sum(each.reward() for each in lakes) / len(lakes)
    assert 0.2 <= success <= 0.55
    assert sum(bool(each.info()["fell"]) for each in lakes) / len(lakes) >= 0.4


def test_maps_are_held_out_and_all_can_be_crossed() -> None:
    train, heldout = ([row["map"] for row in read("lake", name)] for name in ("train.jsonl", "heldout.jsonl"))
    assert (len(set(train)), len(set(heldout))) == (len(train), len(heldout)) == (6000, 300)
    assert not set(train) & set(heldout)
    for text in [*train[:200], *heldout]:
        rows = text.split("/")
        assert text.count("O") == 4
        assert distances(rows)[find(rows, "@")] >= 4


def test_states_recur_in_a_group(lake: tuple[Any, Any]) -> None:
    torch.manual_seed(0)
    shared = turns = 0
    for row in read("lake", "train.jsonl")[:3]:
        counts = Counter(state for _ in range(8) for state in played(lake, row, sampled=True)[1])
        turns += counts.total()
        shared += sum(count for count in counts.values() if count > 1)
    assert shared / turns >= 0.7
