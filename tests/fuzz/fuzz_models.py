"""Bad model folders: configuration, weights and tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fuzz_case import Case, Make, changed, numbered, raw, run_file, together

CONFIG, WEIGHTS, TOKENIZER = "model/config.json", "model/model.safetensors", "model/tokenizer.json"
SETTINGS = "model/tokenizer_config.json"
TRAIN = ("train", "run.yaml")


def model_cases() -> list[Case]:
    """All of them; each has a name of its own."""
    return [*_configs(), *_weights(), *_tokenizers()]


def copied(folder: Path) -> None:
    """The good model, to be spoilt."""
    shutil.copytree(folder.parent / "shared" / "model", folder / "model")


def json_with(name: str, **changes: Any) -> Make:
    """Change keys of a JSON file; None takes a key away."""

    def make(folder: Path) -> None:
        told = {**json.loads((folder / name).read_text(encoding="utf-8")), **changes}
        kept = {key: value for key, value in told.items() if value is not None}
        (folder / name).write_text(json.dumps(kept), encoding="utf-8")

    return make


def without(name: str) -> Make:
    """Take a file away."""
    return lambda folder: (folder / name).unlink()


def with_weights(edit: Callable[[dict[str, Any]], object]) -> Make:
    """Change the weights."""

    def make(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        weights = load_file(folder / WEIGHTS)
        edit(weights)
        save_file(weights, folder / WEIGHTS, metadata={"format": "pt"})

    return make


def _case(name: str, spoil: Make, *mentions: str, **changes: Any) -> Case:
    run = run_file(changed({"model.path": "model", **changes}))
    return Case(name, together(run, copied, spoil), mentions or ("model.path",), TRAIN, opened=True)


def _configs() -> list[Case]:
    short = json_with(CONFIG, max_position_embeddings=4)
    attention = {"model.init": {"attn_implementation": "no-such"}}
    cases = [
        _case("no config.json", without(CONFIG)),
        _case("an unknown type", json_with(CONFIG, model_type="no-such-type"), "model.path", "no-such-type"),
        _case("an encoder's", raw('{"model_type": "vit"}', CONFIG)),
        _case("layers in words", json_with(CONFIG, num_hidden_layers="two")),
        _case("an activation that does not exist", json_with(CONFIG, hidden_act="no-such-act")),
        _case("no room for a prompt", short, "sampling.max_completion_length"),
        _case("an attention that does not exist", lambda _: None, "model.init", **attention),
    ]
    return numbered("config", cases)


def _weights() -> list[Case]:
    up = "model.layers.1.mlp.up_proj.weight"

    def narrow(weights: dict[str, Any]) -> None:
        weights[up] = weights[up][:8].contiguous()

    def cut_off(folder: Path) -> None:
        (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:100_000])

    cases = [
        _case("missing altogether", without(WEIGHTS)),
        _case("with a header that is no JSON", raw((9).to_bytes(8, "little") + b"not JSON!", WEIGHTS)),
        _case("cut off", cut_off),
        _case("one missing", with_weights(lambda weights: weights.pop(up)), "model.path", up),
        _case("one of another shape", with_weights(narrow), "model.path", up),
        _case("of a wider model", json_with(CONFIG, hidden_size=256), "model.path"),
        _case("in an index that names nothing", together(without(WEIGHTS), raw("{}", WEIGHTS + ".index.json"))),
        _case("without a head, untied", json_with(CONFIG, tie_word_embeddings=False), "model.path", "lm_head"),
    ]
    return numbered("weights", cases)


def _added_token(folder: Path) -> None:
    told = json.loads((folder / TOKENIZER).read_text(encoding="utf-8"))
    told["added_tokens"].append({**told["added_tokens"][0], "id": 17, "content": "<think>"})
    rows = json.dumps({"prompt": "1+1=<think>", "answer": "2"}) + "\n"
    (folder / "train.jsonl").write_text(rows * 8, encoding="utf-8")
    (folder / TOKENIZER).write_text(json.dumps(told), encoding="utf-8")


def _tokenizers() -> list[Case]:
    neither = json_with(SETTINGS, pad_token=None, eos_token=None)
    prompts = {"data.path": "train.jsonl"}
    ends = raw('{"eos_token_id": [1, 99]}', "model/generation_config.json")
    cases = [
        _case("missing", together(without(TOKENIZER), without(SETTINGS))),
        _case("settings that are no JSON", raw("{", SETTINGS)),
        _case("without padding or EOS", neither, "padding nor an EOS"),
        _case("with an EOS beyond the model", json_with(SETTINGS, eos_token="<new>"), "model.path", "17"),
        _case("with padding beyond the model", json_with(SETTINGS, pad_token="<new>"), "model.path", "17"),
        _case("with a token of the prompts beyond the model", _added_token, "row 0", "17", **prompts),
        _case("with an EOS of the generation config beyond the model", ends),
    ]
    return numbered("tokenizer", cases)
