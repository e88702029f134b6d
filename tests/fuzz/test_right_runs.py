"""Inputs that look odd and are right: each trains a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from fuzz_case import RUN, Make, changed, raw, run_file, together
from fuzz_data import TEMPLATE, json_lines
from fuzz_models import CONFIG, SETTINGS, copied, json_with, with_weights, without
from support.processes import run

OWN: dict[str, Any] = {"model.path": "model"}
ROWS = [{"prompt": f"{n}+{n}=", "answer": str(2 * n)} for n in range(10, 18)]


def _head(weights: dict[str, Any]) -> None:
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()


def _with_model(*spoil: Make) -> Make:
    return together(run_file(changed(OWN)), copied, *spoil)


def _with_rows(rows: list[dict[str, Any]], **changes: Any) -> Make:
    return together(run_file(changed({"data.path": "a.jsonl", **changes})), raw(json_lines(rows), "a.jsonl"))


SCRIPTS = ("数学", "\u202e1+1=", "\u0661+\u0661=", "\U0001f600", "e\u0301", "\0")
USERS = [{"role": "user", "content": "1+1="}]
WINDOWS = yaml.safe_dump(RUN).replace("\n", "\r\n")
RIGHT: dict[str, Make] = {
    "the run that the bad ones are made from": run_file(RUN),
    "a tokenizer without padding": _with_model(json_with(SETTINGS, pad_token=None)),
    "a tokenizer whose class is of another version": _with_model(json_with(SETTINGS, tokenizer_class="NoSuch")),
    "a model without a generation config": _with_model(without("model/generation_config.json")),
    "a model whose only EOS is in the generation config": _with_model(
        json_with(SETTINGS, eos_token=None), raw('{"eos_token_id": [1, 2]}', "model/generation_config.json")
    ),
    "rows that come twice, ids and all": _with_rows([{**row, "id": 1} for row in ROWS[:2]] * 4),
    "prompts in many scripts": _with_rows([{"prompt": text, "answer": "2"} for text in SCRIPTS]),
    "messages with a template of the run's own": _with_rows(
        [{"prompt": USERS, "answer": "2"}] * 4, **{"model.chat_template_kwargs": {"chat_template": TEMPLATE}}
    ),
    "prompts that are cut": _with_rows(
        [{"prompt": "1+" * 100, "answer": "2"}] * 4, **{"data.long_prompts": "cut"}
    ),
    "a byte order mark and line ends of Windows": raw(b"\xef\xbb\xbf" + WINDOWS.encode()),
    "JSON for YAML": raw(json.dumps(RUN)),
}


def _train(folder: Path) -> None:
    """Train in a process of its own, as DeepSpeed keeps 2 GB of address space for each engine until its end."""
    done = run("-m", "grpox", "train", "run.yaml", cwd=folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("make", RIGHT.values(), ids=RIGHT.keys())
def test_what_looks_odd_but_is_right_trains(make: Make, case_folder: Path) -> None:
    make(case_folder)
    _train(case_folder)
    [metrics] = (case_folder / "out" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    assert 0 <= json.loads(metrics)["metrics"]["reward"] <= 1


def test_a_head_that_is_not_tied_is_trained_by_itself(case_folder: Path) -> None:
    from safetensors.torch import load_file

    changes = {**OWN, "train.learning_rate": 1e-2, "sampling.temperature": 2.0}
    untied = together(copied, json_with(CONFIG, tie_word_embeddings=False), with_weights(_head))
    together(run_file(changed(changes)), untied)(case_folder)
    _train(case_folder)
    weights = load_file(case_folder / "out" / "model" / "model.safetensors")
    assert not weights["lm_head.weight"].equal(weights["model.embed_tokens.weight"])
