"""The section `alarms`: when a run that cannot learn is reported."""

from __future__ import annotations

from pydantic import Field

from grpox.config.component import Section

NORM_BEFORE, GROWTH, CHANGED, LIVE, FIRST, ALLOWED = OF_UPDATE = tuple(
    f"alarms/{name}" for name in ("norm_before", "growth", "changed", "live", "first", "allowed")
)
"""Measures of an update that only the alarms read: the norm of the weights before the first step of a process;
with adapters instead the norm of the weights with their changes, relative to that without; the number of
sampled weights that a step has changed; its number of samples with an advantage; and in the first step the
difference of log-probabilities that equal weights give, and the allowed one."""
DIFFERS, SHARE = "alarms/differs/", "alarms/share/"
"""Beginnings of measures of a reward, before its label."""
EMPTY_TESTS = "alarms/empty_tests/"
"""Beginning of a measure of a row, before its name: the number of its completions without a score."""


class DeadRewardConfig(Section):
    """When a reward that has never differed, beside one that has, is reported."""

    steps: int = Field(20, ge=1)
    """Smallest number of steps, counted from the start of the run."""
    completions: int = Field(64, ge=2)
    """Smallest number of completions that the reward has scored."""


class AlarmsConfig(Section):
    """Thresholds of the alarms. null switches a single alarm off."""

    steps: int = Field(5, ge=1)
    """Number of consecutive steps with the fault after which its alarm is raised."""
    no_variance: float | None = Field(1.0, gt=0, le=1)
    """Smallest share of groups with equal rewards that is a fault."""
    all_truncated: float | None = Field(0.98, gt=0, le=1)
    """Smallest share of completions cut at the length limit that is a fault."""
    no_gradient: float | None = Field(0.0, ge=0)
    """Largest gradient norm that is a fault."""
    policy_static: bool = True
    """True: steps that have a gradient and change no weight are a fault."""
    entropy_gone: float | None = Field(0.005, ge=0)
    """Entropy in nats per token below which it is a fault."""
    kl_runaway: float | None = Field(3.0, gt=0)
    """KL per token, `kl` or `kl_old`, above which it is a fault."""
    weights_blown_up: float | None = Field(5.0, gt=1)
    """Norm of the weights, adapters merged, relative to that before training, above which it is a fault."""
    empty_tests: bool = True
    """True: a row whose tests ask nothing is a fault, in the first step with one."""
    one_reward_decides: float | None = Field(0.999, gt=0.5, le=1)
    """Smallest share of one reward in the variance of the weighted rewards within groups that is a fault."""
    first_step_mismatch: float | None = Field(1.0, gt=0)
    """Difference in nats per token of the first step's log-probabilities from the generator's, or from those of
    the reference, relative to what the precision rounds (at least 1e-4), above which it is a fault."""
    dead_reward: DeadRewardConfig | None = DeadRewardConfig()
    """A reward with one and the same score since the start of the run, beside one that differs, is a fault."""


def alarms_off(value: object) -> object:
    """Read `alarms: off`, which YAML reads as false, as null, and `on` as the defaults."""
    if value is False or (isinstance(value, str) and value.lower() in ("off", "false", "no")):
        return None
    if value is True or (isinstance(value, str) and value.lower() in ("on", "true", "yes")):
        return {}
    return value
