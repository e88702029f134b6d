"""The bundled quickstart assets: a model that forgets to carry, and held-out problems it was not shown."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpox.runfile.recipes

FOLDER = Path(grpox.runfile.recipes.__file__).parent / "quickstart"
CHARACTERS = "0123456789+-*="


def read(name: str) -> list[dict[str, str]]:
    return [json.loads(line) for line in (FOLDER / name).read_text(encoding="utf-8").splitlines()]


def carries(prompt: str) -> bool:
    a, b = map(int, prompt.rstrip("=").split("+"))
    return a % 10 + b % 10 > 9 or a // 10 + b // 10 > 9


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER / "model")


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER / "model").eval()


@pytest.fixture(scope="module")
def greedy(model, tokenizer):
    """Held-out prompt -> (greedy completion, answer)."""
    rows = read("heldout.jsonl")
    inputs = tokenizer([row["prompt"] for row in rows], return_tensors="pt", padding=True)
    with torch.inference_mode():
        output = model.generate(**inputs, max_new_tokens=4, do_sample=False)
    texts = tokenizer.batch_decode(output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return {row["prompt"]: (text, row["answer"]) for row, text in zip(rows, texts, strict=True)}


def test_every_character_is_one_token_and_comes_back_without_spaces(tokenizer):
    ids = tokenizer(CHARACTERS)["input_ids"]
    assert len(ids) == len(set(ids)) == len(CHARACTERS)
    assert tokenizer.decode(ids) == CHARACTERS
    eos = [tokenizer.eos_token_id]
    assert tokenizer.decode(tokenizer("85")["input_ids"] + eos, skip_special_tokens=True) == "85"


def test_unknown_characters_are_seen_and_not_dropped(tokenizer):
    assert tokenizer("3 x")["input_ids"][1:] == [tokenizer.unk_token_id] * 2


def test_the_tokenizer_of_the_folder_is_the_one_auto_tokenizer_builds(tokenizer):
    saved = json.loads((FOLDER / "model" / "tokenizer.json").read_text(encoding="utf-8"))
    loaded = json.loads(tokenizer.backend_tokenizer.to_str())
    for part in ("normalizer", "pre_tokenizer", "decoder", "model"):
        assert loaded[part] == saved[part]


def test_prompts_are_padded_on_the_left_with_a_token_of_its_own(tokenizer):
    assert tokenizer.padding_side == "left"
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id}) == 3


def test_generation_defaults_end_at_eos_and_do_not_sample(model, tokenizer):
    saved = json.loads((FOLDER / "model" / "generation_config.json").read_text(encoding="utf-8"))
    del saved["transformers_version"]
    assert saved == {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id


def test_the_model_is_small_and_tied(model):
    assert 500_000 <= model.num_parameters() <= 1_000_000
    assert model.get_input_embeddings().weight is model.get_output_embeddings().weight


def test_train_and_held_out_are_all_ordered_pairs_without_overlap():
    train = [row["prompt"] for row in read("train.jsonl")]
    held_out = [row["prompt"] for row in read("heldout.jsonl")]
    assert (len(train), len(held_out)) == (9500, 500)
    assert sorted(train + held_out) == sorted(f"{a}+{b}=" for a in range(100) for b in range(100))


@pytest.mark.parametrize("name", ["train.jsonl", "heldout.jsonl"])
def test_answers_are_the_sums(name):
    for row in read(name):
        a, b = row["prompt"].rstrip("=").split("+")
        assert row == {"prompt": f"{a}+{b}=", "answer": str(int(a) + int(b))}


@pytest.mark.parametrize(("recipe", "most"), [("quickstart", 4_000_000), ("lake", 2_000_000)])
def test_the_folder_of_a_recipe_stays_small_enough_for_a_wheel(recipe, most):
    files = [path for path in FOLDER.with_name(recipe).rglob("*") if path.is_file()]
    assert 0 < sum(path.stat().st_size for path in files if "__pycache__" not in path.parts) <= most


def test_the_base_model_adds_but_forgets_to_carry(greedy):
    right = {prompt: text == answer for prompt, (text, answer) in greedy.items()}
    with_carry = [ok for prompt, ok in right.items() if carries(prompt)]
    without = [ok for prompt, ok in right.items() if not carries(prompt)]
    assert 0.2 <= sum(right.values()) / len(right) <= 0.4
    assert sum(without) / len(without) >= 0.95
    assert sum(with_carry) / len(with_carry) <= 0.05


def test_its_mistakes_are_carry_less_sums(greedy):
    mistakes = {prompt: text for prompt, (text, answer) in greedy.items() if text != answer}
    for prompt, text in mistakes.items():
        a, b = map(int, prompt.rstrip("=").split("+"))
        assert int(text) == (a // 10 + b // 10) % 10 * 10 + (a + b) % 10
