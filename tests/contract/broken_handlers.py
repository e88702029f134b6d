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
