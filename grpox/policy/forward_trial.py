"""Compares a model's forward modes with its own forward pass, and sequences in a batch with each one alone."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from grpox.errors import ConfigError, describe, plain
from grpox.policy.attention import VARLEN, probe_kernel, set_attention
from grpox.policy.batch import DEPENDS, FULL_LOGITS, ForwardMode, Sample, collate
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.lora.layers import parameter_counts
from grpox.policy.randomness import disable_dropout, random_fields, random_states
from grpox.runtime.world import World

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FAR = 1e-3
"""Largest difference between the log-probabilities of two modes, as a fraction of their spread over tokens."""
ROUNDINGS = 16
"""Largest difference in rounding steps, used if the model's precision is so low that they are larger."""
TEMPERATURE = 0.7
SWITCH = re.compile(r'"(\w*(?:window|chunk|position|scale|block|context)\w*)": (\d+)')
"""A number in a model's configuration that its forward pass may compare with the length of a sequence."""
LONGEST, CPU_WORK = 8192 + 16, 4e11
"""Most tokens of a trial's long sequence, and on a CPU the most tokens times parameters: some 20 seconds."""


class ForwardTrial:
    """Trials of a model's forward modes; each is a collective, with the same sequences and result on all ranks.

    An error or a difference in a trial rules the mode out and is listed in `failures`. Errors are expected on
    all ranks alike: if one rank failed within the forward pass of a sharded model, the others would wait until
    their time limit.
    """

    def __init__(
        self, model: PreTrainedModel, run: Callable[..., Any], world: World, longest: int | None = None
    ) -> None:
        """Turn the model's dropout off, and run its own forward pass.

        Args:
            run: runs the forward pass of `model`, which may be sharded.
            longest: most tokens of a sequence that the run may have; default: the model's positions.
        """
        self.model, self.run, self.world = model, run, world
        self.failures: list[str] = []
        """Reasons for which modes were ruled out, for the user."""
        disable_dropout(model)
        self._short = [_sample(model, *sizes) for sizes in ((5, 4), (5, 3), (3, 5))]
        self._expected: tuple[Tensor, Tensor] | None = None
        positions = getattr(model.config.get_text_config(), "max_position_embeddings", None) or LONGEST
        work = CPU_WORK / parameter_counts(model)[1] if world.device.type == "cpu" else LONGEST
        most = max(9, int(min(longest or LONGEST, positions, work, LONGEST)))
        numbers = SWITCH.findall(model.config.to_json_string(use_diff=False))
        self.switches = {name: int(number) for name, number in numbers if 0 < int(number) < most}
        """Numbers in the model's configuration that the trial's long sequence exceeds."""
        long = min(most, max([24, *self.switches.values()]) + 16)
        self._pair = [_sample(model, 4, 4), _sample(model, long - 4, 4)]
        self._apart: Tensor | None = None

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
        """Return True if `mode` gives the numbers of the model's own forward pass, beside any sequence."""
        attention = self.model.config._attn_implementation

        def compare() -> str:
            own = "" if mode == FULL_LOGITS else self._difference(self._score(mode))
            return own or self._dependence(mode)

        return self._accepts(f"{mode} with {attention}", compare)

    def accepts_varlen(self) -> bool:
        """Let the model attend by `grpox_varlen`; return True if it can, and the device's kernel is right."""

        def change() -> str:
            set_attention(self.model, VARLEN)
            probe_kernel(self.model, self.world.device)
            return ""

        return self._accepts(f"attention by {VARLEN}", change)

    def _accepts(self, name: str, trial: Callable[[], str]) -> bool:
        """Return True if `trial` returns an empty reason and raises nothing, on every rank."""
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
    def _score(
        self, mode: ForwardMode, samples: Sequence[Sample] | None = None, training: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute log-probabilities and entropies of the tokens, f32[N] each.

        Args:
            samples: default: the short sequences.
        """
        before, batch = self.model.training, collate(samples or self._short, self.world.device, mode)
        self.model.train(training)
        try:
            scored = completion_logprobs(self.run, batch, TEMPERATURE)
        finally:
            self.model.train(before)
        mask = batch.token_mask
        return scored[0][mask], scored[1][mask]

    def _dependence(self, mode: ForwardMode) -> str:
        """Describe how a long neighbour changes log-probabilities; empty if it does not."""
        short, long = self._pair
        try:
            if self._apart is None:
                # The longest sequence of a micro-batch has no padding, so it is computed as if it were alone.
                pairs = ([short, _sample(self.model, 1, 4)], [long, short])
                own = [self._score(FULL_LOGITS, pair)[0][:4] for pair in pairs]
                self._apart = torch.stack(own)
            together = self._score(mode, self._pair)[0].view(2, 4)
        except torch.OutOfMemoryError:  # the run itself may have only shorter sequences
            return ""
        # Medians, as rounding may send single tokens to other experts.
        far, worst = self._far(self._apart), float((together - self._apart).abs().median(dim=1).values.max())
        if worst <= far or not math.isfinite(far):
            return ""
        names = "".join(f", {name} {number}" for name, number in self.switches.items())
        return f"{DEPENDS}: {worst:.2g} apart beside {len(long)} tokens, {far:.2g} allowed{names}"

    def _far(self, expected: Tensor) -> float:
        return max(FAR, ROUNDINGS * torch.finfo(self.model.dtype).eps) * float(expected.std())

    def _difference(self, actual: tuple[Tensor, Tensor]) -> str:
        """Describe a difference from the model's own forward pass; empty without one."""
        assert self._expected is not None
        far = self._far(self._expected[0])
        if not math.isfinite(far):  # the run reports a model with NaN more clearly
            return "met log-probabilities that are not finite"
        pairs = zip(actual, self._expected, strict=True)
        worst = max(float((one - other).abs().max()) for one, other in pairs)
        return "" if worst <= far else f"gave other numbers: {worst:.2g} apart, {far:.2g} allowed"


def _sample(model: PreTrainedModel, prompt: int, completion: int) -> Sample:
    """Build a sequence with these numbers of tokens; prompts of equal length are equal."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    places = (*range(1, prompt + 1), *(prompt + 10 * completion + place for place in range(completion)))
    tokens = tuple((7919 * place) % vocabulary for place in places)
    return Sample(tokens[:prompt], tokens[prompt:], np.ones(completion, bool), np.zeros(completion), 0.0)
