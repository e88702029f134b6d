"""A reward model's folder, read without torch: its adapter, number of outputs and tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from grpox.errors import Problem
from grpox.toolkit import model_problems, read_mapping

ADAPTER_CONFIG = "adapter_config.json"
"""File of an adapter in peft's format."""
TOKENIZER = re.compile(
    r".*(tokenizer|vocab).*|.*\.(model|spm|tiktoken|codes)|merges\.txt|dict\.txt|tekken\.json|.+-bpe\.json"
)
"""Names of files that tokenizers of transformers read their tokens from, or their class."""
TASK = "SEQ_CLS"
"""Task of an adapter that brings the head of a sequence-classification model."""


def adapter_of(model: str) -> dict[str, Any] | None:
    """Read the configuration of an adapter's folder; None if the folder has a whole model."""
    folder = Path(model)
    if (folder / "config.json").is_file() or not (folder / ADAPTER_CONFIG).is_file():
        return None
    return read_mapping(folder / ADAPTER_CONFIG)


def base_of(model: str) -> str | None:
    """Return the base model of an adapter's folder; None if the folder has a whole model."""
    adapter = adapter_of(model)
    return None if adapter is None else str(adapter.get("base_model_name_or_path") or "")


def tokenizer_home(model: str) -> str:
    """Return the folder or hub id from which the tokenizer of `model` is loaded."""
    base = base_of(model)
    return model if base is None or (Path(model) / "tokenizer_config.json").is_file() else base


def folder_problems(model: str) -> Iterator[Problem]:
    """Find reasons why a folder has no reward model; a hub id is not looked up."""
    adapter = adapter_of(model)
    if adapter is None:
        yield from _output_problems(model)
        return
    if (task := adapter.get("task_type")) not in (None, TASK):
        what = f"is an adapter with task_type {task}, not for a sequence-classification model"
        allowed = f"an adapter with task_type {TASK}, or a merged model"
        yield Problem(what, "model", given=model, allowed=allowed)
    base = adapter.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        what = f"is an adapter, and its {ADAPTER_CONFIG} names no base model"
        allowed = "base_model_name_or_path in that file, or a merged model"
        yield Problem(what, "model", given=model, allowed=allowed)
    else:
        for problem in model_problems("model", base):
            what = f"is an adapter, and of its base model {base}: {problem.what}"
            allowed = f"the base model's folder in {ADAPTER_CONFIG}, or a merged model"
            yield Problem(what, "model", "", model, allowed, problem.nearest)


def _output_problems(model: str) -> Iterator[Problem]:
    """Find another number of outputs than one, as transformers reads it from config.json."""
    config = read_mapping(Path(model) / "config.json")
    labels, number = config.get("id2label"), config.get("num_labels")
    if not config or (labels is not None and not isinstance(labels, dict)):
        return  # loading reports it
    if number is not None:  # transformers takes it before id2label
        outputs, written = number, f"num_labels {number}"
    elif labels is not None:
        outputs, written = len(labels), f"id2label of {len(labels)} labels"
    else:
        outputs, written = None, "neither num_labels nor id2label, which to transformers is more than one"
    if outputs != 1:
        what = f"a reward model must have one output, but its config.json has {written}"
        allowed = 'a sequence-classification model with one output, "id2label": {"0": "LABEL_0"}'
        yield Problem(what, "model", given=model, allowed=allowed)


def tokenizer_problems(model: str, tokenizer: str | None) -> Iterator[Problem]:
    """Find a folder without a tokenizer, of which transformers may make one without tokens.

    Args:
        model: the reward model.
        tokenizer: folder or hub id of another tokenizer than the model's.
    """
    home = tokenizer or tokenizer_home(model)
    folder = Path(home)
    if not home or not folder.is_dir() or any(TOKENIZER.fullmatch(path.name) for path in folder.iterdir()):
        return
    allowed = "a folder with tokenizer.json, or another one in the reward's key 'tokenizer'"
    of_base = "" if home in (model, tokenizer) else f" (of its base model {home})"
    key, given = ("model", model) if tokenizer is None else ("tokenizer", tokenizer)
    yield Problem(f"has no tokenizer{of_base}: none of the folder's files holds one", key, "", given, allowed)
