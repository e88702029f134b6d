# ruff: noqa: BLE001, RUF100
"""Losses that catch exceptions: one goes on as if nothing had happened."""

from __future__ import annotations

import logging
import warnings

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


class Notes(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        try:
            return super().per_token(inputs)
        except Exception:
            logging.getLogger("notes").debug("a loss of 0")
            return LossOutput(0 * inputs.logprobs)


class Keeps(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        try:
            return super().per_token(inputs)
        except Exception as error:
            self.reason = f"{error!r}"
            return LossOutput(0 * inputs.logprobs)


class Reports(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        try:
            return super().per_token(inputs)
        except Exception:
            logging.warning("a loss of 0")
            return LossOutput(0 * inputs.logprobs)


class Warns(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        try:
            return super().per_token(inputs)
        except Exception as error:
            warnings.warn(f"a loss of 0: {error}", stacklevel=1)
            return LossOutput(0 * inputs.logprobs)


class Expects(Right):
    def per_token(self, inputs: LossInputs) -> LossOutput:
        try:
            return super().per_token(inputs)
        except ValueError:
            return LossOutput(0 * inputs.logprobs)
