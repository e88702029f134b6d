"""What `model.lora` asks of a run file and of the environment, without importing torch or peft."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from grpox.config import LoraConfig
from grpox.errors import Problem, nearest
from grpox.runfile.check_context import CheckContext

INSTALL = "pip install 'grpox[lora]'"
LONGEST_HEADER = 2**26
"""Bytes of a header of safetensors; one that says more is left to transformers."""


def lora_problems(context: CheckContext) -> Iterator[Problem]:
    """Why adapters cannot be trained."""
    config, lora = context.config, context.config.model.lora
    if lora is None:
        return
    if find_spec("peft") is None:
        yield Problem(f"adapters need peft: {INSTALL}", "model.lora")
    if config.train.sync_ref_model:
        what = "with adapters the reference is the model without them, which cannot follow the policy"
        yield Problem(what, "train.sync_ref_model", given="true", allowed="false, or no model.lora")
    if config.train.gradient_checkpointing_kwargs.get("use_reentrant"):
        what = "with frozen embeddings a re-entrant checkpoint leaves the adapters within it without a gradient"
        key = "train.gradient_checkpointing_kwargs.use_reentrant"
        yield Problem(what, key, given="true", allowed="false")
    if "model.path" not in context.given.inputs:
        yield from _misspelt(lora, weight_names(Path(config.model.path)))


def weight_names(folder: Path) -> list[str]:
    """Names of the weights in a model's folder, out of the headers of its files; empty where there are none."""
    try:
        index = folder / "model.safetensors.index.json"
        if index.is_file():
            return list(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
        return [name for name in _header(folder / "model.safetensors") if name != "__metadata__"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # whoever loads the model says what is wrong with it


def _header(file: Path) -> dict[str, Any]:
    with file.open("rb") as weights:
        size = int.from_bytes(weights.read(8), "little")
        if size > LONGEST_HEADER:
            return {}
        header: dict[str, Any] = json.loads(weights.read(size))
    return header


def _misspelt(lora: LoraConfig, weights: Sequence[str]) -> Iterator[Problem]:
    """Names that are nearly one of the checkpoint's, and none.

    What is like no name there is left to the model itself: some architectures call their layers otherwise than
    their checkpoints do.
    """
    parts = [name.split(".") for name in weights if name.endswith(".weight")]
    known = list(dict.fromkeys(part[-2] for part in parts if len(part) > 1))
    inside = {part for name in parts for part in name}
    for key in ("target_modules", "exclude_modules"):
        names = getattr(lora, key)
        for name in names if isinstance(names, list) else []:
            last = name.rpartition(".")[2]
            near = nearest(last, known)
            if last not in inside and near:
                allowed, what = ", ".join(known), "names no layer of this model"
                yield Problem(what, f"model.lora.{key}", given=name, allowed=allowed, nearest=near)
