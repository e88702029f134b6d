"""Optimizer, schedule and batches: what is not copied as it is."""

from __future__ import annotations

from grpox.runfile.from_trl.draft import TRL_DEFAULT, Draft, our_default, whole
from grpox.runfile.from_trl.fields import FIELDS, Verdict


def write_copied(draft: Draft) -> None:
    """Write the fields whose value is that of a key: those given, and TRL's defaults that are not ours."""
    for name, field in FIELDS.items():
        if not field.copied or draft.unread(name) or (field.needs and not draft.get(field.needs)):
            continue
        value = draft.get(name)
        if value is not None and (draft.has(name) or value != our_default(field.key)):
            draft.put(field.key, value, "" if draft.has(name) else TRL_DEFAULT)


def write_training(draft: Draft) -> None:
    """Mend what was copied, where TRL writes something in another way."""
    train = draft.values.setdefault("train", {})
    steps = draft.get("max_steps")
    if isinstance(steps, int) and steps > 0:
        train.pop("num_train_epochs", None)
        draft.unneeded(("num_train_epochs",), "max_steps is given")
    _warmup(draft)
    _optimizer(draft)
    if "max_grad_norm" in draft.setup.fields and draft.get("max_grad_norm") is None:
        draft.put("train.max_grad_norm", 0.0)
    _sampling(draft)


def _warmup(draft: Draft) -> None:
    """transformers 5 takes warmup_steps below 1 for a part of all steps."""
    steps = draft.get("warmup_steps")
    if draft.has("warmup_steps") and isinstance(steps, int | float):
        key = "warmup_ratio" if 0 < steps < 1 else "warmup_steps"
        draft.put(f"train.{key}", whole(steps))
        if steps >= 1 and draft.values["train"].pop("warmup_ratio", None) is not None:
            draft.unneeded(("warmup_ratio",), "warmup_steps is given")


def _optimizer(draft: Draft) -> None:
    optim = draft.get("optim")
    if optim in ("adamw_torch", "adamw_torch_fused"):
        draft.copy("optim")
    elif draft.has("optim"):
        draft.ask("train.optimizer", "{path: my_optimizer.py:Mine}", f"TRL has {optim}; without it, AdamW")
        draft.explain("optim", Verdict.UNSUPPORTED, "AdamW, or a component in train.optimizer")


def _sampling(draft: Draft) -> None:
    fields = draft.setup.fields
    if "max_completion_length" in fields and draft.get("max_completion_length") is None:
        draft.ask("sampling.max_completion_length", "512", "TRL has no bound here; grpox needs one")
    top_k = draft.get("top_k")
    if isinstance(top_k, int) and top_k < 0:
        draft.put("sampling.top_k", 0)
