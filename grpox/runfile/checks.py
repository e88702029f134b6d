"""Checks that a run's components, sampling and batches fit together, and the context of every check."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from grpox.config import RunConfig, SamplingConfig
from grpox.contracts import Capability, Reduction
from grpox.errors import Problem, join
from grpox.plugins.component import LEVELS, BoundComponent
from grpox.plugins.discovery import PluginSet
from grpox.plugins.requirements import canonical_name, unmet
from grpox.runfile.objects import RunObjects
from grpox.runtime.signals import raise_if_signal

NEUTRAL = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0, "min_completion_length": 0}
"""Keys of `sampling` that change only the generator's distribution -> neutral value.

The trainer's distribution is softmax(logits / temperature) over all tokens.
"""
LOGIT_KWARGS = frozenset(
    (
        # transformers' GenerationConfig
        *("bad_words_ids", "begin_suppress_tokens", "encoder_no_repeat_ngram_size"),
        *("encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "exponential_decay_length_penalty"),
        *("forced_eos_token_id", "no_repeat_ngram_size", "sequence_bias", "suppress_tokens", "top_h"),
        *("typical_p", "watermarking_config"),
        # vLLM's SamplingParams
        *("allowed_token_ids", "bad_words", "frequency_penalty", "logit_bias", "presence_penalty"),
        *("structured_outputs", "thinking_token_budget"),
    )
)
"""Keys of `sampling.generation_kwargs` that change the generator's distribution at any value."""
LOSS_INPUTS = (
    Capability.ENTROPY,
    Capability.OLD_LOGPROBS,
    Capability.ENTROPY_GRADIENT,
    Capability.REFERENCE_LOGPROBS,
    Capability.SAMPLER_LOGPROBS,
    Capability.REWARDS,
    Capability.GROUP_IDS,
    Capability.SEQUENCE_IDS,
    Capability.COLUMNS,
)
"""Capabilities that the core provides, to losses alone."""


def changed_distribution(sampling: SamplingConfig) -> list[str]:
    """List the settings that change only the sampled distribution, not the trained one: ``["top_p 0.9"]``."""
    values = {name: getattr(sampling, name) for name in NEUTRAL}
    kwargs = [f"generation_kwargs.{name}" for name in sampling.generation_kwargs if name in LOGIT_KWARGS]
    return [f"{name} {value}" for name, value in values.items() if value != NEUTRAL[name]] + kwargs


@dataclass
class CheckContext:
    """Argument of every check: a run file that fits its schema, with all its components."""

    config: RunConfig
    """Config with absolute input paths."""
    components: Mapping[str, BoundComponent]
    """Bound components by key."""
    plugins: PluginSet
    """Installed plugins."""
    given: RunObjects
    """Python objects that replace inputs of the config."""
    trains: bool = True
    """True if the run reads training data and writes the output folder."""
    num_prompts: int | None = None
    """Number of prompts in the training data, once a check has counted them."""
    columns: dict[str, tuple[str, ...]] = field(default_factory=dict)
    """``data.path`` and ``evaluation.path`` -> columns beside the prompt, once a check has read all of them."""

    @property
    def generator(self) -> BoundComponent:
        return self.components["generator"]

    @property
    def correction(self) -> BoundComponent:
        return self.components["correction"]

    @property
    def loss(self) -> BoundComponent:
        return self.components["loss"]

    @property
    def changed_sampling(self) -> str:
        """Name the settings that change only the sampled distribution: ``sampling with top_p 0.9``."""
        changed = changed_distribution(self.config.sampling)
        return f"sampling with {', '.join(changed)}" if changed else ""

    def offered(self, kind: str, capability: str) -> list[str]:
        """Name the installed components of a kind that provide a capability."""
        offers = (offer for offer in self.plugins.offers if offer.kind == kind)
        return [offer.spec.name for offer in offers if capability in offer.spec.provides]


def missing_plugins(context: CheckContext) -> Iterator[Problem]:
    """Find entries of ``plugins.required``, such as ``grpox-foo>=1.2``, that no loaded plugin meets."""
    from packaging.requirements import Requirement

    for position, requirement in enumerate(context.config.plugins.required):
        place = join("plugins.required", position)
        reason, _ = unmet(requirement)
        if reason:
            yield Problem(reason, place, given=requirement)
            continue
        name = canonical_name(Requirement(requirement).name)
        records = [record for record in context.plugins.records if canonical_name(record.distribution) == name]
        if not records:
            yield Problem("is installed, but has no grpox plugin", place, given=requirement)
        for record in records:
            if record.status != "ok":
                yield Problem(f"{record} is {record.status}: {record.reason}", place, given=requirement)


def refused_by_components(context: CheckContext) -> Iterator[Problem]:
    """Ask the generator's config for settings that it cannot honour, and the rewards' for unusable files.

    See `grpox.contracts.Generator` and `grpox.contracts.RewardFunction`.
    """
    config = context.generator.config
    for name, argument in (("check_sampling", context.config.sampling), ("check_run", context.config)):
        if check := getattr(config, name, None):
            yield from check(argument)
    for key, bound in context.components.items():
        if bound.kind == "reward" and (check := getattr(bound.config, "check_files", None)):
            yield from (replace(problem, key=join(key, problem.key)) for problem in check())


def logprobs_problems(context: CheckContext) -> Iterator[Problem]:
    """Find reasons why the generator's log-probabilities cannot be used by what reads them."""
    train, loss, correction = context.config.train, context.loss, context.correction
    corrects, threshold = Capability.LOGPROBS in correction.needs, train.off_policy_mask_threshold
    if corrects and context.changed_sampling:  # which changes mu, but not pi_old
        what = (
            f"{correction} would be biased: the generator reports log-probabilities of its own distribution, "
            "and these settings change that distribution but not the trainer's"
        )
        neutral = ", ".join(f"{name} {value:g}" for name, value in NEUTRAL.items())
        allowed = f"correction none, or sampling with {neutral} and no generation_kwargs that change logits"
        yield Problem(what, "correction", given=context.changed_sampling, allowed=allowed)
    users = {}
    if train.old_logprobs == "generator":
        users["train.old_logprobs"] = ("generator", "policy")
        if corrects:
            what = f"{correction} would correct nothing: the ratio already uses the generator's probabilities"
            yield Problem(what, "correction", allowed="none")
    if Capability.SAMPLER_LOGPROBS in loss.needs:
        users["loss"] = (
            f"{loss}, which needs sampler_logprobs",
            "a loss without them, or another generator",
        )
    if threshold is not None:
        users["train.off_policy_mask_threshold"] = (f"{threshold:g}", "null")
    for key, (given, allowed) in users.items():
        if Capability.LOGPROBS not in context.generator.provides:
            what = f"{context.generator} does not say that it reports log-probabilities"
            yield Problem(what, key, given=given, allowed=allowed)
        if context.changed_sampling:
            what = "the generator's log-probabilities belong to a different distribution than the trainer's"
            yield Problem(what, key, given=context.changed_sampling, allowed=allowed)


def misplaced_needs(context: CheckContext) -> Iterator[Problem]:
    """Find components that need what the core gives to losses alone."""
    provided = {capability for bound in context.components.values() for capability in bound.provides}
    for key, bound in context.components.items():
        for need in bound.needs:
            if bound.kind != "loss" and need in LOSS_INPUTS and need not in provided:
                what = f"{bound} needs '{need}', which grpox gives to losses alone"
                yield Problem(
                    what, key, given=f"needs {bound.needs}", allowed="a component that does without it"
                )


def train_problems(context: CheckContext) -> Iterator[Problem]:
    """Find keys of the section `train` that exclude each other, or that the components do not support."""
    train, generator, correction = context.config.train, context.generator, context.correction
    if train.sync_ref_model and train.beta == 0 and Capability.REFERENCE_LOGPROBS not in context.loss.needs:
        what = "sync_ref_model needs beta > 0: with beta 0 there is no reference"
        allowed = "false, or train.beta above 0, or a loss that needs reference_logprobs"
        yield Problem(what, "train.sync_ref_model", given="true", allowed=allowed)
    adaptive, coef = train.adaptive_entropy, train.entropy_coef
    if adaptive is not None and adaptive.min > adaptive.max:
        key, allowed = "train.adaptive_entropy.min", f"at most train.adaptive_entropy.max, {adaptive.max:g}"
        yield Problem("is above the largest coefficient", key, given=f"{adaptive.min:g}", allowed=allowed)
    elif adaptive is not None and not adaptive.min <= coef <= adaptive.max:
        what = "is not within the bounds of train.adaptive_entropy, which begins with it"
        near, allowed = min(max(coef, adaptive.min), adaptive.max), f"from {adaptive.min:g} to {adaptive.max:g}"
        yield Problem(what, "train.entropy_coef", "", f"{coef:g}", allowed, f"{near:g}")
    if (staleness := train.max_staleness) > 0 and Capability.AHEAD not in generator.provides:
        able = context.offered("generator", Capability.AHEAD)
        allowed = " or ".join(["0", *(f"with generator {name}" for name in able)])
        what = f"{generator} cannot sample while the policy is updated"
        yield Problem(what, "train.max_staleness", given=str(staleness), allowed=allowed)
    if staleness > 0 and Capability.LOGPROBS not in correction.needs and train.old_logprobs == "policy":
        given, allowed = (
            str(staleness),
            "0, or a correction such as token-truncate, or train.old_logprobs: generator",
        )
        if context.changed_sampling:
            given, allowed = f"{given}, {context.changed_sampling}, which no correction supports", "0"
        what = f"{correction} does not correct for samples of an earlier policy"
        yield Problem(what, "train.max_staleness", given=given, allowed=allowed)
    if declared_scope(context.loss) == "group":
        yield from parted_groups(context.config, context.loss)
    if (rounds := train.dynamic_sampling_rounds) is not None and train.max_steps < 0:
        what = "set the number of steps: with train.dynamic_sampling_rounds a batch uses any number of prompts"
        yield Problem(what, "train.max_steps", given=str(train.max_steps), allowed="at least 0")
    if rounds is not None and staleness > 0:
        what = "does not work with dynamic sampling: groups are scored only after the updates they overlap with"
        allowed = "null, or train.max_staleness: 0"
        yield Problem(what, "train.dynamic_sampling_rounds", given=str(rounds), allowed=allowed)


def parted_groups(config: RunConfig, loss: BoundComponent) -> Iterator[Problem]:
    """Find reasons why `loss`, of scope "group", cannot be given whole groups."""
    if Capability.GROUP_IDS not in loss.needs:
        what = f"{loss} has scope 'group' and cannot tell groups apart: it has to need group_ids"
        yield Problem(what, "loss", given=f"needs {loss.needs}", allowed="needs = ('group_ids',)")
    train, budget = config.train, config.train.max_tokens_per_micro_batch
    size, group = train.per_device_train_batch_size, train.num_generations
    if size % group:
        below = size // group * group
        yield Problem(
            f"would part groups of {group}: {loss} has scope 'group' and is given whole groups",
            "train.per_device_train_batch_size",
            given=str(size),
            allowed=f"a multiple of train.num_generations, {group}",
            nearest=f"{below} or {below + group}" if below else str(group),
        )
    prompt, completion = config.data.max_prompt_length, config.sampling.max_completion_length
    if isinstance(budget, int) and budget < group * ((prompt or 1) + completion):
        what = f"is less than a whole group can need, and {loss} has scope 'group': its groups cannot be parted"
        formula = f"{group} * ({prompt or 'a prompt'} + {completion})"
        allowed = f"null, or at least train.num_generations * the longest sequence, {formula} tokens"
        yield Problem(what, "train.max_tokens_per_micro_batch", given=str(budget), allowed=allowed)


def declared_scope(loss: BoundComponent, imports: bool = False) -> str:
    """Read the scope of a loss: its class's, or "token" where that is known only when the run builds it.

    Args:
        imports: import a plugin's class, which may take seconds, in any case; else only if it needs group_ids,
            as one of scope "group" has to.
    """
    if loss.offer is not None and Capability.GROUP_IDS not in loss.needs and not imports:
        return "token"
    scope = _declared(loss, "scope")
    return scope if isinstance(scope, str) else "token"


def _declared(bound: BoundComponent, name: str) -> Any:
    """Read an attribute of a component's class; None if it lacks it, or cannot be loaded."""
    try:
        return getattr(bound.load(), name, None)
    except BaseException as error:  # noqa: BLE001 - a plugin's own code; building it reports the failure
        raise_if_signal(error)
        return None


def declared_level(bound: BoundComponent) -> str | None:
    """Read the level of a loss or correction: its config's, else its class's; None if it is unknown."""
    level = getattr(bound.config, "level", None)
    level = level if level in LEVELS else _declared(bound, "level")
    return level if level in LEVELS else None


def level_warnings(context: CheckContext) -> Iterator[str]:
    """Warn of weights of whole completions in a loss of tokens, and of their ratios in a sum over tokens."""
    correction, loss = context.correction, context.loss
    weighs = Capability.LOGPROBS in correction.needs and declared_level(correction) == "sequence"
    if weighs and declared_level(loss) == "token":
        yield (
            f"correction: {correction.label} weighs whole completions, loss: {loss.label} has a ratio for each "
            "token; the weights of long completions spread widely: use a correction of tokens such as "
            "token-truncate, or a loss of sequences such as {name: grpo, level: sequence} "
            "(docs/corrections.md#levels)"
        )
    has_level = hasattr(loss.config, "level") and declared_level(loss) == "sequence"
    by_length = (Reduction.TOKEN_MEAN, Reduction.LOCAL_TOKEN_MEAN, Reduction.SEQUENCE_SUM_BY_MAX_LENGTH)
    if has_level and _declared(loss, "reduction") in by_length:
        yield (
            f"loss: {loss.label} with level: sequence sums over tokens, so that a completion counts by its "
            "length: GSPO is loss: {name: grpo, level: sequence} (docs/algorithms.md#clipped)"
        )


def divides_steps(loss: BoundComponent) -> bool:
    """Tell whether a step may be divided into micro-batches in any way; False if that is known only later."""
    reduction = _declared(loss, "reduction")
    is_local = not isinstance(reduction, Reduction) or reduction is Reduction.LOCAL_TOKEN_MEAN
    return not is_local and declared_scope(loss, imports=True) != "group"


def stream_problems(config: RunConfig) -> Iterator[Problem]:
    """Find keys that do not fit streamed data."""
    steps = config.train.max_steps
    if steps <= 0:
        what = "set the number of steps: streamed data has no known length"
        yield Problem(what, "train.max_steps", given=str(steps), allowed="at least 1")
    yield from cut_stream_problems("data.split", config.data.split)


def cut_stream_problems(key: str, split: str) -> Iterator[Problem]:
    """Find a split of streamed data that is a part of another."""
    if "[" in split:
        allowed = split.partition("[")[0] + ", or streaming: false"
        yield Problem("a stream cannot be cut into parts", key, given=split, allowed=allowed)
