# ruff: noqa: BLE001, RUF100
"""Losses that catch exceptions: one goes on as if nothing had happened."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable

import torch
from broken_losses import Right

from grpox.contracts import LossInputs, LossOutput


class HidesErrors(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        try:
            return LossOutput(-torch.exp(inputs.logprobs - inputs.old_logprobs) * inputs.advantages)
        except Exception:
            return LossOutput(-inputs.logprobs)


class RemarksAndHidesErrors(HidesErrors):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        warnings.warn("a remark of each call", stacklevel=1)
        logging.warning("another")
        return super().per_token(inputs)


def catching(handle: Callable[[Right, Exception], object], caught: type[Exception] = Exception) -> type:
    """Make a loss that handles an exception, after which its loss is 0."""

    def per_token(self: Right, inputs: LossInputs) -> LossOutput:
        try:
            return Right.per_token(self, inputs)
        except caught as error:
            handle(self, error)
            return LossOutput(0 * inputs.logprobs)

    return type("Catching", (Right,), {"per_token": per_token, "__module__": __name__})


Notes = catching(lambda self, error: logging.getLogger("notes").debug("a loss of 0"))
Keeps = catching(lambda self, error: setattr(self, "reason", f"{error!r}"))
Reports = catching(lambda self, error: logging.warning("a loss of 0"))
Warns = catching(lambda self, error: warnings.warn(f"a loss of 0: {error}", stacklevel=1))
Expects = catching(lambda self, error: None, ValueError)
