"""Checks of the section `evaluation` and of keys that name a metric, and the metrics that a run will log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from grpox.config import EvaluationConfig, RewardRef, RunConfig, labels_of
from grpox.config.run import rewards_of
from grpox.config.sampling import PREFIX, bare_name, sampling_of
from grpox.contracts import FINISH_REASONS
from grpox.errors import Problem, nearest, nearest_spelling
from grpox.plugins.component import BoundComponent
from grpox.plugins.requirements import canonical_name
from grpox.runfile.checks import CheckContext, cut_stream_problems

LENGTHS = tuple(
    f"completions/{name}"
    for name in (
        *("mean_length", "min_length", "max_length", "clipped_ratio"),
        *("mean_terminated_length", "min_terminated_length", "max_terminated_length"),
    )
)
OF_STEPS = (
    *("reward", "reward_std", "frac_reward_zero_std", "loss", "grad_norm", "learning_rate", "entropy"),
    *("policy_loss", "entropy_coef", "adaptive_entropy/coef", "router_aux_loss", "weights/norm"),
    *("kl", "kl_old", "num_tokens", "epoch", "step_time", "padding_fraction", "skipped_steps"),
    "off_policy_masked",
    *LENGTHS,
)
"""Full names of metrics of an optimizer step."""
FAMILIES = (
    *("ratio", "clip_ratio", "mismatch", "sampling", "dynamic_sampling", "top_entropy"),
    *("time", "tokens_per_second", "memory", "observers"),
)
"""Beginnings of further metrics of a step."""
OF_EPISODES = (
    *("turns/mean", "turns/min", "turns/max", "episodes/observation_tokens", "episodes/lost"),
    *(f"episodes/ended_by/{reason}" for reason in FINISH_REASONS),
)
"""Names of metrics of episodes, in steps and evaluations."""
EPISODE_FAMILIES = ("tools", "info", "rewards/environment")
"""Beginnings of further metrics of episodes, whose names tools and environments choose."""


@dataclass(frozen=True)
class MetricNames:
    """Names of the metrics of steps or evaluations, as far as they are known before the run.

    Reward functions and losses log additional metrics (`log_metric`), so any name that begins with the name of
    the component may exist. With a third-party component, any name that does not resemble a known one may
    exist.
    """

    known: Sequence[str]
    owners: Iterable[str]
    """Names of the components that log additional metrics, and beginnings of families of metrics."""
    components: Iterable[BoundComponent]
    instead: Mapping[str, str] = field(default_factory=dict)
    """Names that the run does not log -> those to use."""

    def has(self, name: str) -> bool:
        """Return True if a metric of this name may exist."""
        beginnings = tuple(f"{each}/" for each in self.owners if each not in ("rewards", "completions"))
        if name in self.known or name.startswith(beginnings):
            return True
        if name in self.instead or name.startswith("rewards/") or nearest_spelling(name, self.known):
            return False
        offers = [bound.offer for bound in self.components]
        return any(each is None or canonical_name(each.distribution) != "grpox" for each in offers)


def of_evaluations(config: RunConfig, components: Mapping[str, BoundComponent]) -> MetricNames:
    """Name the metrics of the run's evaluations, without the prefix ``evaluation/``."""
    rewards, evaluation, main = rewards_of(config), config.evaluation, bare_name(config.main_metric)
    known = ["reward", "reward_std", *_of_rewards(rewards), *LENGTHS]
    owners, sets = _owners(rewards), [""]
    if evaluation is not None:
        known = [*(f"pass_at_{k}" for k in evaluation.pass_at_k), *known]
        sets += [f"{name}/" for name in evaluation.sets]
    has_accuracy = evaluation is None or main == "accuracy"
    known = ["accuracy", *known] if has_accuracy else known
    if config.has_episodes:
        known, owners = [*known, "success", *OF_EPISODES], [*owners, *EPISODE_FAMILIES]
    prefix = "rewards[" if rewards is config.rewards else "evaluation.rewards["
    return MetricNames(
        [f"{each}{name}" for each in sets for name in known],
        [f"{each}{owner}" for each in sets for owner in owners],
        [bound for key, bound in components.items() if key.startswith(prefix)],
        {} if has_accuracy else {f"{each}accuracy": f"{each}{main}" for each in sets},
    )


def of_steps(config: RunConfig, components: Mapping[str, BoundComponent]) -> MetricNames:
    """Name the metrics of the run's optimizer steps."""
    known = [*OF_STEPS, *_of_rewards(config.rewards)]
    owners = [*_owners(config.rewards), config.loss.label, *FAMILIES]
    if config.has_episodes:
        known, owners = [*known, "episodes/success", *OF_EPISODES], [*owners, *EPISODE_FAMILIES]
    logging = ("loss", "correction", "rewards[")
    return MetricNames(known, owners, [each for key, each in components.items() if key.startswith(logging)])


def _of_rewards(rewards: Sequence[RewardRef]) -> Iterator[str]:
    for label, ref in zip(labels_of(rewards), rewards, strict=True):
        kinds = ("mean", "std", "abstained", *(("errors",) if ref.on_error == "abstain" else ()))
        yield from (f"rewards/{label}/{kind}" for kind in kinds)


def _owners(rewards: Sequence[RewardRef]) -> list[str]:
    return [*labels_of(rewards), *(ref.label.rpartition(":")[2] for ref in rewards)]


def evaluation_problems(context: CheckContext) -> Iterator[Problem]:
    """Find mistakes in the evaluation's settings, and named metrics that will not be logged."""
    evaluation = context.config.evaluation
    if evaluation is not None:
        # The mean of the first reward is called accuracy if its scores are declared 0 or 1.
        rewards, is_run = rewards_of(context.config), evaluation.rewards is None
        first = context.components["rewards[0]" if is_run else "evaluation.rewards[0]"]
        evaluation._is_binary = rewards[0].binary or bool(getattr(first.config, "is_binary", False))
        yield from _sets(context, evaluation)
        labels, name = labels_of(rewards), evaluation.accuracy
        if name is not None and name not in labels:
            what = f"no such reward of {'this run' if is_run else 'the evaluation'}"
            yield Problem(what, "evaluation.accuracy", "", name, ", ".join(labels), nearest(name, labels))
        most = evaluation.num_generations
        for place, k in enumerate(evaluation.pass_at_k):
            key, allowed = f"evaluation.pass_at_k[{place}]", f"1 to {most} (evaluation.num_generations)"
            if not 1 <= k <= most:
                what = "must be from 1 to the number of completions per prompt"
                yield Problem(what, key, given=str(k), allowed=allowed)
            elif k in evaluation.pass_at_k[:place]:
                yield Problem("is listed twice", key, given=str(k))
        yield from _sampling(context, evaluation)
        yield from _early_stop(context, evaluation)
    yield from _best(context)


def _sets(context: CheckContext, evaluation: EvaluationConfig) -> Iterator[Problem]:
    """Find a missing or second source of prompts, and names of sets that metrics cannot have."""
    if (evaluation.path is None) == (not evaluation.sets):
        what = "a value is required" if evaluation.path is None else "is given beside evaluation.sets"
        allowed = "a file of held-out prompts, or several in evaluation.sets"
        yield Problem(what, "evaluation.path", given=evaluation.path or "", allowed=allowed)
    known = of_evaluations(context.config.model_copy(update={"evaluation": None}), context.components).known
    reserved = {metric.partition("/")[0] for metric in known} | set(EPISODE_FAMILIES)
    reserved |= {*_owners(rewards_of(context.config)), *(f"pass_at_{k}" for k in evaluation.pass_at_k)}
    reserved.add(PREFIX.rstrip("/"))  # else the metrics of the set would take the place of those of all sets
    for name, chosen in evaluation.sets.items():
        key = f"evaluation.sets.{name}"
        if chosen.streaming:
            yield from cut_stream_problems(f"{key}.split", chosen.split)
        if not re.fullmatch(r"[\w.-]+", name):
            what, allowed = "is no name for metrics", "letters, digits, and _ . -"
            yield Problem(what, "evaluation.sets", given=repr(name), allowed=allowed)
        elif name in reserved:
            what = "metrics of evaluations begin with this name already"
            yield Problem(what, key, given=name, allowed=f"another name, such as on_{name}")


def _sampling(context: CheckContext, evaluation: EvaluationConfig) -> Iterator[Problem]:
    sampling, key = sampling_of(evaluation, context.config.sampling), "evaluation.sampling"
    if evaluation.num_generations > 1 and sampling.temperature == 0:
        what = "decodes greedily, so all completions of a prompt would be equal"
        given = f"0 with evaluation.num_generations {evaluation.num_generations}"
        yield Problem(what, "evaluation.temperature", given=given, allowed="more than 0, or num_generations 1")
    if sampling.min_completion_length > sampling.max_completion_length:
        what = f"is more than max_completion_length {sampling.max_completion_length}"
        yield Problem(what, f"{key}.min_completion_length", given=str(sampling.min_completion_length))
    if "" in (evaluation.sampling.stop or []):
        yield Problem("a text is empty, so every completion would end at once", f"{key}.stop")
    check = getattr(context.generator.config, "check_sampling", None)
    for problem in () if check is None else check(sampling):
        name = problem.key.removeprefix("sampling.").partition(".")[0].partition("[")[0]
        if getattr(evaluation.sampling, name, None) is not None:  # else `refused_by_components` reports it
            yield replace(problem, key=f"evaluation.{problem.key}")


def _early_stop(context: CheckContext, evaluation: EvaluationConfig) -> Iterator[Problem]:
    chosen = evaluation.early_stop
    if chosen is None:
        return
    if evaluation.every == 0:
        what = "early stopping needs evaluations between the first and the last step"
        yield Problem(what, "evaluation.early_stop", given="evaluation.every 0", allowed="evaluation.every > 0")
    names, key = of_evaluations(context.config, context.components), "evaluation.early_stop.metric"
    if not names.has(bare_name(chosen.metric)):
        bare = bare_name(chosen.metric.removeprefix("eval_"))
        near = names.instead.get(bare) or nearest(bare, names.known)
        what, allowed = "no such metric of the evaluation", ", ".join(names.known)
        yield Problem(what, key, given=chosen.metric, allowed=allowed, nearest=near)


def _best(context: CheckContext) -> Iterator[Problem]:
    config, name, key = context.config, context.config.checkpoint.best, "checkpoint.best"
    if name is None:
        return
    steps = of_steps(config, context.components)
    known, is_known = list(steps.known), name in steps.known
    if config.evaluation is not None:
        evaluations = of_evaluations(config, context.components)
        known = [*(f"{PREFIX}{each}" for each in evaluations.known), *known]
        is_known |= name.startswith(PREFIX) and evaluations.has(bare_name(name))
    elif name.startswith(PREFIX):
        allowed = "a metric of steps, such as reward, or a section evaluation"
        yield Problem("this run has no evaluation", key, given=name, allowed=allowed)
        return
    # ``accuracy`` and TRL's ``eval_accuracy`` mean the metric of the evaluation; they are not typos.
    bare = bare_name(name.removeprefix("eval_").removeprefix("eval/"))
    ours = PREFIX + (bare if config.evaluation is None else evaluations.instead.get(bare, bare))
    near = ours if ours in known else nearest(name, known)
    is_of_step = not name.startswith(PREFIX) and not near.startswith(PREFIX) and steps.has(name)
    if not (is_known or is_of_step):
        yield Problem("this run logs no such metric", key, given=name, allowed=", ".join(known), nearest=near)
