"""Compares the forward modes of a model with its own forward pass, on short sequences and on every rank."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpox.errors import ConfigError, describe, plain
from grpox.policy.attention import VARLEN, probe_kernel, set_attention
from grpox.policy.batch import RolloutBatch, Sample, collate
from grpox.policy.logprobs import FULL_LOGITS, ForwardMode, completion_logprobs
from grpox.policy.randomness import disable_dropout, random_fields, random_states
from grpox.runtime.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAR = 1e-3
"""Largest difference between the log-probabilities of two modes, as a fraction of their spread over tokens."""
ROUNDINGS = 16
"""Largest difference in rounding steps, used if the model's precision is so low that they are larger."""
TEMPERATURE = 0.7


class ForwardTrial:
    """Trials of a model's forward modes; each is a collective, with the same sequences and result on all ranks.

    An error of a trial, or a difference, rules the mode out and is listed in `failures`. Errors are expected on
    all ranks alike: an error of a single rank within the forward pass of a sharded model would leave the other
    ranks waiting until their time limit.
    """

    def __init__(self, model: PreTrainedModel, run: Callable[..., Any], world: World) -> None:
        """Turn the model's dropout off, and run its own forward pass.

        Args:
            run: runs the forward pass of `model`, which may be sharded.
        """
        self.model, self.run, self.world = model, run, world
        self.failures: list[str] = []
        """Reasons for which modes were ruled out, for the user."""
        disable_dropout(model)
        self._batch = _sequences(model, world.device)
        self._expected: tuple[Tensor, Tensor] | None = None

        def forward() -> str:
            self._expected = self._score(FULL_LOGITS)
            return ""

        self.is_possible = self._accepts("the model's own forward pass", forward)
        """False if the model's own forward pass fails, which then is in `failures`."""

    def check_repeats(self) -> None:
        """Check that the model's own forward pass is the same in training mode, and draws no random numbers.

        Raises:
            ConfigError: it is not; on every rank.
        """

        def repeat() -> str:
            disable_dropout(self.model)  # again, as some models make modules in their first forward pass
            before = random_states(self.world.device)
            scored = self._score(FULL_LOGITS, training=True)
            if before != random_states(self.world.device):
                return "drew random numbers"
            is_finite = bool(torch.cat(scored).isfinite().all())  # the run reports a NaN more clearly
            return self._difference(scored) if is_finite else ""

        if self.is_possible and not self._accepts("training mode", repeat):
            what = "computes something else in training mode than in sampling, also with its dropout turned off"
            fields = ", ".join(random_fields(self.model)) or "no field that is random by its name"
            given = f"{type(self.model).__name__}, with {fields} in its config"
            allowed = "a model that is the same in training and in eval mode"
            raise ConfigError(f"{what}: {self.failures[-1]}", "model.path", given=given, allowed=allowed)

    def agrees(self, mode: ForwardMode) -> bool:
        """Return True if `mode` gives the log-probabilities and entropies of the model's own forward pass."""
        attention = self.model.config._attn_implementation
        return self._accepts(f"{mode} with {attention}", lambda: self._difference(self._score(mode)))

    def accepts_varlen(self) -> bool:
        """Let the model attend by `grpox_varlen`; return True if it can, and the device's kernel is right."""

        def change() -> str:
            set_attention(self.model, VARLEN)
            probe_kernel(self.model, self.world.device)
            return ""

        return self._accepts(f"attention by {VARLEN}", change)

    def _accepts(self, name: str, trial: Callable[[], str]) -> bool:
        """Return True if `trial` returns no reason against it, and raises nothing, on any rank."""
        try:
            reason = trial()
        except Exception as error:  # noqa: BLE001 - a model's code may raise anything for unusual inputs
            reason = f"raised {plain(describe(error))}"
        own = torch.tensor(int(not reason), device=self.world.device)
        agreed = bool(self.world.reduce(own, dist.ReduceOp.MIN))
        if not agreed:
            self.failures.append(f"the trial of {name} {reason or 'failed on another rank'}")
        return agreed

    @torch.no_grad()
    def _score(self, mode: ForwardMode, training: bool = False) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies of the tokens, f32[N] each."""
        before = self.model.training
        self.model.train(training)
        try:
            scored = completion_logprobs(self.run, self._batch, TEMPERATURE, mode)
        finally:
            self.model.train(before)
        mask = self._batch.token_mask
        return scored[0][mask], scored[1][mask]

    def _difference(self, actual: tuple[Tensor, Tensor]) -> str:
        """Describe a difference from the model's own forward pass; empty without one."""
        assert self._expected is not None
        far = max(FAR, ROUNDINGS * torch.finfo(self.model.dtype).eps) * float(self._expected[0].std())
        if not math.isfinite(far):  # the run reports a model with NaN more clearly
            return "met log-probabilities that are not finite"
        pairs = zip(actual, self._expected, strict=True)
        worst = max(float((one - other).abs().max()) for one, other in pairs)
        return "" if worst <= far else f"gave other numbers: {worst:.2g} apart, {far:.2g} allowed"


def _sequences(model: PreTrainedModel, device: torch.device) -> RolloutBatch:
    """Build two sequences of one prompt, and one sequence of another prompt."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    tokens = [(7919 * (place + 1)) % vocabulary for place in range(20)]
    parts = [(tokens[:5], tokens[5:9]), (tokens[:5], tokens[9:12]), (tokens[12:15], tokens[15:20])]
    samples = [
        Sample(tuple(prompt), tuple(completion), np.ones(len(completion), bool), np.zeros(len(completion)), 0.0)
        for prompt, completion in parts
    ]
    return collate(samples, device)
