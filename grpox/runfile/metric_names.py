"""Which metrics a run will log, as far as its run file tells: for keys that name one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from grpox.config import RewardRef, RunConfig, labels_of
from grpox.config.run import rewards_of
from grpox.config.sampling import PREFIX
from grpox.errors import nearest
from grpox.plugins.component import BoundComponent
from grpox.plugins.requirements import canonical_name

LENGTHS = tuple(
    f"completions/{name}"
    for name in (
        *("mean_length", "min_length", "max_length", "clipped_ratio"),
        *("mean_terminated_length", "min_terminated_length", "max_terminated_length"),
    )
)
OF_STEPS = (
    *("reward", "reward_std", "frac_reward_zero_std", "loss", "grad_norm", "learning_rate", "entropy"),
    *("kl", "kl_old", "num_tokens", "epoch", "step_time", "padding_fraction", "skipped_steps"),
    "off_policy_masked",
    *LENGTHS,
)
"""Metrics of an optimizer step whose whole name is known."""
FAMILIES = (
    *("ratio/", "clip_ratio/", "sampling/", "dynamic_sampling/", "top_entropy/"),
    *("time/", "tokens_per_second/", "memory/", "observers/"),
)
"""Beginnings of names of which a step may have any."""


class MetricNames:
    """The metrics of steps or of evaluations, and whether there may be others.

    Reward functions log what they like (`log_metric`), and so does a loss. A name that begins with that of the
    component is taken for one of these. Where a component is not grpox's own, so is any name that does not look
    like a slip of one that is known.
    """

    def __init__(self, known: Collection[str], owners: Collection[str], open_ended: bool) -> None:
        """
        Args:
            owners: what the components are called that log metrics of their own.
            open_ended: whether one of them is not grpox's own.
        """
        self.known = list(known)
        self._beginnings = tuple(f"{owner}/" for owner in owners if owner not in ("rewards", "completions"))
        self._open_ended = open_ended

    def has(self, name: str) -> bool:
        """Whether there may be a metric of this name."""
        if name in self.known or name.startswith(self._beginnings):
            return True
        return self._open_ended and not nearest(name, self.known) and not name.startswith("rewards/")


def of_evaluations(config: RunConfig, components: Mapping[str, BoundComponent]) -> MetricNames:
    """Of the run's evaluations, as these call them: without ``evaluation/``."""
    rewards = rewards_of(config)
    ks = config.evaluation.pass_at_k if config.evaluation is not None else []
    known = ["accuracy", *(f"pass_at_{k}" for k in ks), "reward", "reward_std", *_of_rewards(rewards), *LENGTHS]
    own = rewards is not config.rewards
    of_rewards = _bound(components, lambda key: key.startswith("evaluation.rewards[" if own else "rewards["))
    return MetricNames(known, _names(rewards), any(map(_foreign, of_rewards)))


def of_steps(config: RunConfig, components: Mapping[str, BoundComponent]) -> MetricNames:
    """Of the run's optimizer steps."""
    known = [*OF_STEPS, *_of_rewards(config.rewards)]
    parts = _bound(components, lambda key: key in ("loss", "correction") or key.startswith("rewards["))
    owners = [*_names(config.rewards), config.loss.label, *(family.rstrip("/") for family in FAMILIES)]
    return MetricNames(known, owners, any(map(_foreign, parts)))


def candidates(name: str, steps: MetricNames, evaluations: MetricNames | None) -> tuple[list[str], str]:
    """The names that a key may have which takes metrics of either, and the nearest of them to `name`."""
    of_evaluation = [] if evaluations is None else evaluations.known
    # ``accuracy`` or TRL's ``eval_accuracy`` are not misspelt: they are the evaluation's.
    bare = name.removeprefix("eval_").removeprefix("eval/").removeprefix(PREFIX)
    known = [*(f"{PREFIX}{each}" for each in of_evaluation), *steps.known]
    return known, f"{PREFIX}{bare}" if bare in of_evaluation else nearest(name, known)


def _of_rewards(rewards: Sequence[RewardRef]) -> Iterator[str]:
    for label, ref in zip(labels_of(rewards), rewards, strict=True):
        kinds = ("mean", "std", "abstained", *(("errors",) if ref.on_error == "abstain" else ()))
        yield from (f"rewards/{label}/{kind}" for kind in kinds)


def _names(rewards: Sequence[RewardRef]) -> list[str]:
    return list(dict.fromkeys([*labels_of(rewards), *(ref.label.rpartition(":")[2] for ref in rewards)]))


def _bound(components: Mapping[str, BoundComponent], chosen: Callable[[str], bool]) -> list[BoundComponent]:
    return [bound for key, bound in components.items() if chosen(key)]


def _foreign(bound: BoundComponent) -> bool:
    """Whether a component is not one of grpox's own."""
    return bound.offer is None or canonical_name(bound.offer.distribution) != "grpox"
