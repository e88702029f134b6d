"""Alarms of a run that cannot learn: a fault of several consecutive steps is reported once, with a cure.

`Alarms.see` gets the metrics of each step and decides from them alone, so that a resumed run, which has the
state of the checkpoint, raises the same alarms.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from grpox.config.alarms import (
    ALLOWED,
    CHANGED,
    DIFFERS,
    EMPTY_TESTS,
    FIRST,
    GROWTH,
    LIVE,
    NORM_BEFORE,
    SHARE,
    AlarmsConfig,
)
from grpox.runtime.files import as_strict_json, write_atomically

FILE = "alarms.json"
"""Alarms of a run in its folder, written when one is raised."""
PAGE = "docs/troubleshooting.md#alarms"
SOLVED = 0.9
"""Place of the mean reward, between the lowest and the highest of the run, from which equal rewards are no
fault."""
OFTEN = 0.25
"""Share of groups in which a reward differs that makes it one that could teach."""
ADVICE = {
    "no_variance": (
        "all completions of each prompt have the same reward, so nothing is learnt",
        "read completions: does the reward recognise right answers? Use easier or harder prompts, partial "
        "credit, or a larger train.num_generations",
    ),
    "all_truncated": (
        "completions are cut at the length limit",
        "raise sampling.max_completion_length, and check that the model knows its end of turn "
        "(sampling.stop_token_ids)",
    ),
    "no_gradient": (
        "the gradient is 0 although rewards differ",
        "look at the advantages in the completions, at what the loss leaves out "
        "(train.mask_truncated_completions, masks of the correction), and at own losses and advantages",
    ),
    "policy_static": (
        "there is a gradient, but no weight changes",
        "look at learning_rate in the metrics: it is 0, or too small for the precision of the weights; and at "
        "train.optimizer and train.scheduler",
    ),
    "entropy_gone": (
        "the policy has almost no entropy left, so completions no longer differ",
        "go back to an earlier checkpoint with a lower train.learning_rate, a larger loss.clip_high, or "
        "train.entropy_coef",
    ),
    "kl_runaway": (
        "the policy has moved far from the reference, or from the policy that sampled the batch",
        "lower train.learning_rate, raise train.beta, or take fewer steps on a batch (train.num_iterations)",
    ),
    "weights_blown_up": (
        "the norm of the weights is a multiple of what it was before training",
        "lower train.learning_rate, set train.max_grad_norm, and start again: such weights do not recover",
    ),
    "one_reward_decides": (
        "one reward makes up the variance of the weighted rewards within groups, so the others teach nothing",
        "compare rewards/<f>/std: scale the rewards to a similar size, change their weights, or use "
        "'advantage: {name: group, aggregation: normalize_then_sum}'; a reward that never differs may be wrong",
    ),
    "empty_tests": (
        "the tests of a row ask nothing, so the row has no score",
        "let its tests assert results, and call what they define; grpox validate asks the first rows",
    ),
    "first_step_mismatch": (
        "sampling, training or the reference compute different log-probabilities from equal weights",
        "look at mismatch/difference_mean and kl of the first step, and compare what the generator computes in "
        "with model.dtype",
    ),
    "dead_reward": (
        "this reward has had the same score since the start of the run, so it teaches nothing",
        "score a right and a wrong completion by hand; a penalty that no completion has met is no fault",
    ),
}
"""Name of an alarm -> its fault, and what to look at."""


AT_ONCE = ("empty_tests", "first_step_mismatch")
"""Alarms that a single step raises."""

Range = tuple[float, float, int]
"""Lowest and highest score, and number of scored completions."""


class RaisedAlarm(BaseModel):
    """An alarm, as `summary.json` has it."""

    model_config = ConfigDict(use_attribute_docstrings=True, ser_json_inf_nan="strings")

    name: str
    step: int
    """Optimizer step after which it was raised."""
    value: float
    """Value of the last step that counted."""
    subject: str = ""
    """Label of the reward that decides, or is dead, or name of a row; empty for other alarms."""
    cause: str = ""
    """Likely cause, where one is known."""

    def entry(self) -> dict[str, Any]:
        """Return the alarm as plain values for JSON; numbers that JSON lacks are strings."""
        entry = self.model_dump(exclude_defaults=True)
        return entry if math.isfinite(self.value) else entry | {"value": str(self.value)}


class AlarmsState(BaseModel):
    """State of the alarms, saved in checkpoints."""

    model_config = ConfigDict(use_attribute_docstrings=True, ser_json_inf_nan="strings")

    counts: dict[str, int] = Field(default_factory=dict)
    """Name of an alarm -> consecutive steps with its fault."""
    raised: list[RaisedAlarm] = Field(default_factory=list)
    norm: float | None = None
    """Norm of the weights before the first step."""
    highest: float | None = None
    """Highest weighted reward so far."""
    lowest: float | None = None
    is_flat: bool = False
    """True if the last generation batch had no advantage other than 0, and no group with different rewards."""
    is_silent: bool = False
    """True if the last generation batch had no advantage other than 0."""
    differed: list[str] = Field(default_factory=list)
    """Labels of the rewards that have differed within a group."""
    steps: int = 0
    """Steps that were seen."""
    ranges: dict[str, Range] = Field(default_factory=dict)
    """Label of a reward -> what it has scored so far."""


class Reading(NamedTuple):
    """A value that an alarm watches, in one step."""

    alarm: str
    value: float
    is_fault: bool
    subject: str = ""


class Alarms:
    """Counts consecutive steps with a fault. A step without the value of an alarm counts neither way."""

    def __init__(self, config: AlarmsConfig) -> None:
        self.config = config
        self.state = AlarmsState()

    def see(
        self, step: int, metrics: Mapping[str, float], ranges: Mapping[str, Range] | None = None
    ) -> list[RaisedAlarm]:
        """Record the metrics and signals of a step, and return the alarms that it raises.

        Args:
            metrics: those of the step with `Collector.signals` and `grpox.config.alarms.OF_UPDATE`.
            ranges: of the rewards in the step's new generation batches; default: there is none.
        """
        state = self.state
        state.steps += 1
        raised = self._dead_rewards(step, ranges) if ranges else []
        known = {alarm.name for alarm in state.raised}
        for name, value, is_fault, subject in self._read_batch(metrics) + self._read_update(metrics):
            count = state.counts[name] = state.counts.get(name, 0) + 1 if is_fault else 0
            if count >= (1 if name in AT_ONCE else self.config.steps) and name not in known:
                raised.append(RaisedAlarm(name=name, step=step, value=value, subject=subject))
        state.raised += raised
        return raised

    def _dead_rewards(self, step: int, ranges: Mapping[str, Range]) -> list[RaisedAlarm]:
        """Find the rewards that have been constant since the first step, beside one that has not."""
        state, config = self.state, self.config.dead_reward
        for label, (low, high, count) in ranges.items():
            lowest, highest, before = state.ranges.get(label, (low, high, 0))
            state.ranges[label] = min(low, lowest), max(high, highest), count + before
        if config is None or not config.steps <= state.steps == step:
            return []
        dead = {label: (low, count) for label, (low, high, count) in state.ranges.items() if low == high}
        if len(dead) == len(state.ranges):
            return []
        known = {alarm.subject for alarm in state.raised if alarm.name == "dead_reward"}
        return [
            RaisedAlarm(name="dead_reward", step=step, value=value, subject=label)
            for label, (value, count) in dead.items()
            if count >= config.completions and label not in known
        ]

    def _read_batch(self, metrics: Mapping[str, float]) -> list[Reading]:
        """Read the generation batch of a step; nothing in a step without a new one."""
        config, readings = self.config, list[Reading]()
        flat = metrics.get("frac_reward_zero_std")
        if flat is not None:
            # Some scalers compare groups with each other: equal rewards in a group are no fault there.
            without_advantage = metrics.get("alarms/no_advantage", flat)
            useless = min(flat, without_advantage)
            self.state.is_flat, self.state.is_silent = useless == 1, without_advantage == 1
            is_solved = self._is_solved(metrics)
            if config.no_variance is not None:
                is_fault = useless >= config.no_variance and not is_solved
                readings.append(Reading("no_variance", flat, is_fault))
        cut = metrics.get("completions/clipped_ratio")
        if cut is not None and config.all_truncated is not None:
            readings.append(Reading("all_truncated", cut, cut >= config.all_truncated))
        differs: dict[str, float] = {}
        shares: dict[str, float] = {}
        empty = ""
        for name, value in metrics.items():
            if name.startswith(DIFFERS):
                differs[name.removeprefix(DIFFERS)] = value
            elif name.startswith(SHARE):
                shares[name.removeprefix(SHARE)] = value
            elif name.startswith(EMPTY_TESTS) and not empty:
                empty = name
        if empty and config.empty_tests:
            readings.append(Reading("empty_tests", metrics[empty], True, empty.removeprefix(EMPTY_TESTS)))
        return readings + self._read_shares(differs, shares) if differs else readings

    def _is_solved(self, metrics: Mapping[str, float]) -> bool:
        """Return True if the mean reward is near the highest of a run whose rewards have differed."""
        state = self.state
        if (high := metrics.get("alarms/highest")) is not None:
            state.highest = high if state.highest is None else max(high, state.highest)
        if (low := metrics.get("alarms/lowest")) is not None:
            state.lowest = low if state.lowest is None else min(low, state.lowest)
        if state.highest is None or state.lowest is None or "reward" not in metrics:
            return False
        span = state.highest - state.lowest
        return span > 0 and (metrics["reward"] - state.lowest) / span >= SOLVED

    def _read_shares(self, differs: Mapping[str, float], shares: Mapping[str, float]) -> list[Reading]:
        """Read which reward decides.

        Rewards that differed in earlier steps and now do not, in most groups, are learnt: that is no fault.

        Args:
            differs: label of a reward -> share of the groups in which it differs.
            shares: label -> its share of the variance of the weighted rewards.
        """
        seen, readings, limit = self.state.differed, list[Reading](), self.config.one_reward_decides
        if shares and limit is not None:
            first = max(shares, key=shares.__getitem__)
            others = [label for label in differs if label != first]
            teach = any(label not in seen or differs[label] >= OFTEN for label in others)
            readings.append(
                Reading("one_reward_decides", shares[first], shares[first] >= limit and teach, first)
            )
        seen += [label for label, often in differs.items() if often > 0 and label not in seen]
        return readings

    def _read_update(self, metrics: Mapping[str, float]) -> list[Reading]:
        config, state, readings = self.config, self.state, list[Reading]()
        norm, changed = metrics.get("grad_norm"), metrics.get(CHANGED)
        first, factor = metrics.get(FIRST), config.first_step_mismatch
        if first is not None and factor is not None:
            readings.append(Reading("first_step_mismatch", first, first > factor * metrics[ALLOWED]))
        # A step may get the groups with equal rewards of a batch that other steps learn from.
        is_live = state.is_silent or metrics.get(LIVE, 1) > 0
        if norm is not None and config.no_gradient is not None and is_live:
            # Equal rewards have an alarm of their own, and need none where the task is solved.
            readings.append(Reading("no_gradient", norm, norm <= config.no_gradient and not state.is_flat))
        if norm is not None and changed is not None and config.policy_static:
            readings.append(Reading("policy_static", changed, changed == 0 and norm > 0))
        entropy = metrics.get("entropy")
        if entropy is not None and config.entropy_gone is not None:
            readings.append(Reading("entropy_gone", entropy, entropy < config.entropy_gone))
        kl = metrics.get("kl", metrics.get("kl_old"))
        if kl is not None and config.kl_runaway is not None:
            kl = max(kl, metrics.get("kl_old", kl))
            readings.append(Reading("kl_runaway", kl, not kl <= config.kl_runaway))
        state.norm = metrics.get(NORM_BEFORE) if state.norm is None else state.norm
        size, growth = metrics.get("weights/norm"), metrics.get(GROWTH)
        if growth is None and size is not None and state.norm:
            growth = size / state.norm
        if growth is not None and config.weights_blown_up is not None:
            readings.append(Reading("weights_blown_up", growth, growth > config.weights_blown_up))
        return readings


def describe_alarm(alarm: Mapping[str, Any], advice: bool = True) -> str:
    """Format an alarm of `summary.json` or `alarms.json`: its name, step, value and fault.

    Args:
        advice: add what to look at.
    """
    name, value = str(alarm.get("name")), alarm.get("value")
    shown = f"{value:.4g}" if isinstance(value, int | float) else str(value)
    subject = f" of {alarm['subject']}" if alarm.get("subject") else ""
    text = f"{name} at step {alarm.get('step')}, value {shown}{subject}"
    if name not in ADVICE:
        return text
    fault, cure = ADVICE[name]
    fault += f"; {alarm['cause']}" if alarm.get("cause") else ""
    return f"{text}: {fault}" + (f". {cure[0].upper()}{cure[1:]}" if advice else "")


def alarms_in(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the entries under ``alarms`` of a `summary.json` or `alarms.json`."""
    alarms = content.get("alarms")
    return [each for each in alarms if isinstance(each, dict)] if isinstance(alarms, list) else []


def write_alarms(folder: Path, alarms: Sequence[Mapping[str, Any]]) -> None:
    """Write ``alarms.json`` into a run's folder.

    Raises:
        OSError: it cannot be written.
    """
    write_atomically(folder / FILE, as_strict_json({"alarms": list(alarms)}) + "\n")
