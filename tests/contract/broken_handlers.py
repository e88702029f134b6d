# ruff: noqa: BLE001, RUF100
"""Components whose file hides exceptions: the whole file of a component is read."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from grpox.contracts import LossInputs, LossOutput, Reduction


class HidesErrors:
    reduction: ClassVar[Reduction] = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        try:
            return LossOutput(-torch.exp(inputs.logprobs - inputs.old_logprobs) * inputs.advantages)
        except Exception:
            return LossOutput(-inputs.logprobs)


def reports(text: str) -> float:
    try:
        return float(text)
    except Exception as error:
        raise ValueError("no number") from error


def uses(text: str) -> str:
    try:
        return text.lower()
    except Exception as error:
        return str(error)


def deliberate(text: str) -> float:
    try:
        return float(text)
    except Exception:  # noqa: BLE001 - whatever a subclass of str raises
        return 0.0


def expected(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return 0.0


def abstains(completions: list[Any], **columns: Any) -> list[float | None]:
    scores: list[float | None] = []
    for completion in completions:
        try:
            scores.append(float(completion))
        except Exception:
            scores.append(None)
    return scores
