"""The contracts between core and plugins: protocols and frozen dataclasses, with shapes.

Shapes: `B` sequences of a micro-batch, `T` completion positions, `N` completions of a generation batch over
all ranks, `K` reward functions, `G` completions per prompt. Torch is imported for type checkers only.

All of this is plugin API, provisional until grpox's first release: docs/plugin-api.md describes how it changes.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Protocol, SupportsFloat, runtime_checkable

from grpox.errors import brief

if TYPE_CHECKING:
    import datasets
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from grpox.config import RunConfig, SamplingConfig


# -- Parameters ------------------------------------------------------------------------------------------


class Input(Enum):
    """The sort of file or folder under a path that a component's config names.

    The core makes a relative path absolute, from the run file's folder, or from the working directory where it
    was given on the command line. It checks that something is there, except for a cache.
    """

    PATH = "path"
    """A file or a folder."""
    MODEL = "model"
    """A model folder in Hugging Face format, or a hub id, which stays as it is."""
    TOKENIZER = "tokenizer"
    """A tokenizer's folder, which needs no config.json, or a hub id, which stays as it is."""
    CACHE = "cache"
    """The component's own folder, which it creates if it is missing."""


InputPath = Annotated[str, Input.PATH]
"""The type of a parameter that is the path of a file or folder, which must be there."""
ModelPath = Annotated[str, Input.MODEL]
"""The type of a parameter that is a model: a folder with a config.json, or a hub id."""
TokenizerPath = Annotated[str, Input.TOKENIZER]
"""The type of a parameter that is a tokenizer: a folder, or a hub id."""
CachePath = Annotated[str, Input.CACHE]
"""The type of a parameter that is the component's own folder, which need not exist."""


class Capability(StrEnum):
    """Names in `needs` and `provides` that the core knows; plugins may define further names among
    themselves."""

    LOGPROBS = "logprobs"
    """A generator reports the log-probability of each token that it samples."""
    STREAMING = "streaming"
    """A generator yields each rollout while other completions are still sampled."""
    AHEAD = "ahead"
    """A generator has `begin`: it samples in the background while the policy is updated."""
    MAX_TOKENS = "max_tokens"
    """A generator honours `Prompt.max_tokens`."""
    EPISODE_REWARD = "episode_reward"
    """An environment, or a generator, scores whole episodes, `Episode.rewards`."""
    TURN_REWARDS = "turn_rewards"
    """An environment, or a generator, has rewards of single turns, `Turn.reward`."""
    STATE_KEYS = "state_keys"
    """An environment, or a generator, names the state in which each turn begins, `Turn.state_key`."""
    OTHER_NUMERICS = "other-numerics"
    """A generator's forward is not the trainer's own."""
    ENTROPY = "entropy"
    """The core gives a loss the entropy of each token's distribution."""
    OLD_LOGPROBS = "old_logprobs"
    """The core gives a loss log pi_old."""
    ENTROPY_GRADIENT = "entropy_gradient"
    """The entropy that the core gives a loss has a gradient."""
    REFERENCE_LOGPROBS = "reference_logprobs"
    """The core gives a loss the log-probabilities under the reference, for any `train.beta`."""
    SAMPLER_LOGPROBS = "sampler_logprobs"
    """The core gives a loss the log-probabilities that the generator reported."""
    REWARDS = "rewards"
    """The core gives a loss the rewards of each sequence."""
    GROUP_IDS = "group_ids"
    """The core gives a loss the group of each sequence."""
    SEQUENCE_IDS = "sequence_ids"
    """The core gives a loss the id of each sequence."""
    COLUMNS = "columns"
    """The core gives a loss the dataset's columns."""


# -- State and steps: optional for components of every kind ----------------------------------------------


@dataclass(frozen=True)
class StepContext:
    """The optimizer step that begins, for `begin_step`."""

    step: int
    """Number of the step, counted from 1."""
    total_steps: int
    epoch: float
    """Passes over the data before this step."""


class Stateful(Protocol):
    """A component with a state that outlasts a call; a component of any kind can have one.

    Checkpoints save the state with the plugin's name and version, and a resumed run restores it on any number
    of ranks. A run has one state per component: rank 0 saves it, and states that differ between ranks are an
    error at the checkpoint. A component that changes its own attributes and has neither method causes a warning
    at the first checkpoint, unless it declares ``stateless = True``.
    """

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state: numbers, strings, None, tensors, and lists, tuples and dicts of these."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned, before the first step of a resumed run."""
        ...


StatisticReduction = Literal["sum", "mean", "min", "max", "gather"]
"""Reductions of a statistic's values to one result over all ranks; ``gather`` gives all values in row order."""


class StepAware(Protocol):
    """A component that follows the optimizer steps, with one or both methods; possible for every kind.

    `statistics` names values of the step, each with its reduction over all ranks. Values of trained tokens are
    ``ratio``, ``kl_old``, ``kl``, ``entropy``, ``advantages`` and the diagnostics of the run's loss; values of
    completions are ``reward``, ``advantage`` and ``length``. ``ratio`` is pi / pi_old, without the correction.
    A step that is skipped because its loss or gradient is not finite is reported too; its values may be NaN.
    """

    statistics: ClassVar[Mapping[str, StatisticReduction]]

    def begin_step(self, context: StepContext) -> None:
        """Prepare for a step; called once on every rank, before anything is sampled for the step."""
        ...

    def end_step(self, statistics: Mapping[str, float | Tensor]) -> None:
        """Process a completed step; called once on every rank, with the same values on all of them.

        Args:
            statistics: name -> a number, or for ``gather`` f32[values of all ranks] in row order, the tokens of
                a row one after the other.
        """
        ...


# -- Losses ----------------------------------------------------------------------------------------------


class Reduction(Enum):
    """Rules by which per-token losses become the loss of one optimizer step (all micro-batches, all ranks)."""

    TOKEN_MEAN = "token_mean"
    """sum m*l / N_tok"""
    SEQUENCE_MEAN = "sequence_mean"
    """(1/N_seq) * sum_i (1/n_i) sum_t m*l"""
    SEQUENCE_SUM = "sequence_sum"
    """(1/N_seq) * sum_i sum_t m*l"""
    SEQUENCE_SUM_BY_MAX_LENGTH = "sequence_sum_by_max_length"
    """sum m*l / (N_seq * max_completion_length)"""
    LOCAL_TOKEN_MEAN = "local_token_mean"
    """mean over micro-batches of sum m*l / sum m: depends on the micro-batch size by definition"""


@dataclass(frozen=True)
class LossInputs:
    """Inputs of a policy loss. Masked positions hold neutral values (log-probabilities 0, advantage 0)."""

    logprobs: Tensor  # f32[B, T], with gradient
    old_logprobs: Tensor  # f32[B, T]
    advantages: Tensor  # f32[B, T]
    token_mask: Tensor  # bool[B, T]
    entropy: Tensor | None = None  # f32[B, T], without gradient unless the loss needs "entropy_gradient"
    correction_weights: Tensor | None = None  # f32[B, T], only for a loss that folds the correction
    # The following are None unless the loss asks for them by `needs`, under their own names.
    reference_logprobs: Tensor | None = None  # f32[B, T]
    sampler_logprobs: Tensor | None = None  # f32[B, T], equal to old_logprobs where unknown
    rewards: Tensor | None = None  # f32[B, K] in the run file's order, NaN where a function abstained
    # The ids of a filler, in which no token counts, are negative.
    group_ids: Tensor | None = None  # i64[B], equal for sequences of one prompt in one generation batch
    sequence_ids: Tensor | None = None  # i64[B], no two of a run alike
    columns: Mapping[str, Sequence[Any]] | None = None  # column of the dataset but the prompt -> B values


@dataclass(frozen=True)
class LossOutput:
    """Unreduced output of a policy loss; the core masks and reduces both, over all ranks."""

    loss: Tensor  # f32[B, T]
    diagnostics: Mapping[str, Tensor] = field(default_factory=dict)
    """Name -> f32[B, T], averaged over tokens; or f32[B], one number a sequence, averaged over sequences."""


@runtime_checkable
class PolicyLoss(Protocol):
    """A per-token policy loss. It never sees a normaliser, a rank or an accumulation step.

    Optional attributes: ``folds_correction: bool = False``: the loss applies the correction itself. The others
    are declarations for tests and tools. ``gradient: "value" | "surrogate" = "value"``: the gradient of a
    surrogate is not that of its value. ``zero_at_zero_advantage: bool = False``: tokens with advantage 0 add no
    gradient. ``entropy_as_constant: bool = False``: the value depends on the entropy, and the gradient must
    not.
    ``sign: "policy" | "other" = "policy"``: whether a step must raise the probability of a token with positive
    advantage.

    ``scope: "token" | "group" = "token"``: a loss of scope "group" gets whole groups, all G sequences of each
    prompt in one micro-batch.

    ``level: "token" | "sequence"``, of the loss or of its config, where it may be a parameter: each token has
    an importance ratio of its own, or its loss depends on the ratios of its whole sequence. A run warns if the
    correction has the level "sequence" and the loss the level "token". Default: unknown.
    """

    reduction: ClassVar[Reduction]

    def per_token(self, inputs: LossInputs) -> LossOutput:
        """Return the loss of every token, to be minimised: f32[B, T].

        The run uses the tensors of `inputs` afterwards: a loss that changes one in place ends the run.
        """
        ...


# -- Advantages, corrections -----------------------------------------------------------------------------


@dataclass(frozen=True)
class Turn:
    """One turn of the model in a completion: the tokens ``completion_ids[start:end]``, which it wrote."""

    start: int
    end: int
    finish_reason: str
    """The reason why the turn ended, as in `Rollout.finish_reason`."""
    policy_version: int
    """Optimizer steps taken by the weights that sampled it."""
    reward: float | None = None
    """The environment's reward for this turn; None if it gives none."""
    state_key: str | None = None
    """Equal for turns that began in the same state of an environment; None if this is unknown."""


@dataclass(frozen=True)
class AdvantageInputs:
    """N completions of a generation batch, of all ranks, in row order. Everything is the scaler's own copy."""

    rewards: Tensor  # f32[N, K], NaN where a function abstained; the sum if a function returned a list
    weights: Tensor  # f32[K]
    group_ids: Tensor  # i64[N]
    prompt_ids: Tensor  # i64[N]: the dataset's row of each completion's prompt
    lengths: Tensor  # i64[N]: tokens of each completion
    model_masks: Sequence[Tensor]  # N of bool[T_i]: tokens that the model wrote
    columns: Mapping[str, Sequence[Any]]  # column of the dataset -> N values
    step: int
    """The optimizer step, counted from 1, that first trains on the batch."""
    turns: Sequence[tuple[Turn, ...]]  # N, each with at least one turn
    labels: Sequence[str] = ()
    """K labels of the reward functions, in the order of the columns of `rewards`."""
    token_rewards: Mapping[str, Sequence[Tensor]] = field(default_factory=dict)
    """Label of a reward function that returned lists -> N of f32[T_i]: each reward at the last token of its
    turn or part, 0 elsewhere; all NaN where the function abstained."""


class AdvantageScaler(Protocol):
    """Turns the rewards of a whole generation batch (all ranks) into advantages.

    It is called on every rank with the same values, as tensors on the CPU, once per generation batch. So it may
    change its own state in `scale`.

    Optional, and read by the conformance suite: ``needs_nonnegative_rewards: bool = False``, True for a scaler
    that raises where a weighted sum of rewards is below 0.

    Alternatively ``scale(inputs: AdvantageInputs)``; the number of parameters tells the two forms apart. A
    scaler of that form may have ``per: "completion" | "turn" | "token" = "completion"``, and then returns a
    list of N tensors in place of f32[N]: f32[turns of the completion] or f32[T_i]. A turn's advantage is for
    all of its tokens; tokens that the model did not write have advantage 0.

    ``signal: "sum" | "functions" | "all"`` names the values that must differ within a group for nonzero
    advantages: the weighted sum of the rewards, the rewards of a function whose weight is not 0, or any value,
    also lists, turns and their states. Dynamic sampling replaces the other groups; with ``"all"`` it replaces
    groups that get only advantages of 0 from a copy of the scaler. Default: ``"sum"``, and ``"all"`` for
    ``scale(inputs)``.

    For tests: ``monotone: bool = True``, a better reward within a group gives no smaller advantage;
    ``example_columns``, column -> values, and ``example_labels``, labels of the reward functions that return
    lists, for a scaler of the form ``scale(inputs)`` that needs them.
    """

    def scale(self, rewards: Tensor, weights: Tensor, group_ids: Tensor) -> Tensor:
        """Return the advantages f32[N].

        Args:
            rewards: f32[N, K], NaN where a function abstained; the scaler's own copy, as are the others.
            weights: f32[K].
            group_ids: i64[N].
        """
        ...


class Correction(Protocol):
    """Importance weights that correct for samples from a distribution other than pi_old.

    Optional, and read only by the metrics (`grpox.update.mismatch`): a method ``raw(old, sampler, mask)`` ->
    [B, T] returns R before any cap or mask, perhaps infinite. It is needed if R is not exp(log pi_old - log mu)
    of single tokens. ``weighs_by_raw: bool = True`` is False if kept tokens have another weight than raw or a
    cap.

    ``monotone: bool = True``, for tests: the weight of a kept token does not fall if its probability under the
    trainer rises, compared with that under the generator.

    ``corrects: bool = True``, for tests: tokens are weighed or dropped where the two distributions differ.

    ``level: "token" | "sequence"``, of the correction or of its config: weights are of single tokens, or one of
    a whole completion; see `PolicyLoss`. Default: unknown.
    """

    def correct(self, old: Tensor, sampler: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights f32[B, T] and keep bool[B, T], both without a gradient.

        Args:
            old: f32[B, T], log pi_old.
            sampler: f32[B, T], log mu; equal to `old` where the generator reported none.
            mask: bool[B, T]; masked positions of the others may have any value.

        The run uses the arguments afterwards: a correction that changes one in place ends the run.
        """
        ...


# -- Rewards ---------------------------------------------------------------------------------------------

Message = Mapping[str, Any]
Text = str | Sequence[Message]
"""A prompt or completion: a string (plain dataset) or role/content messages (conversational dataset)."""

Scores = Sequence[float | Sequence[float] | None]


class FailedScore(float):
    """A score that a reward function could not obtain: NaN with a reason; `on_error` decides what happens.

    A function that fails for some of its completions returns it for these, and scores for the others. A
    function without an opinion on a completion returns None instead.
    """

    def __new__(cls, reason: str) -> FailedScore:
        score = super().__new__(cls, "nan")
        score.reason = reason
        return score

    reason: str
    """Reason for the missing score, for the user."""


FLOAT32_MAX = 3.4028234663852886e38
"""Largest score: a larger one would be infinite in float32, the type of rewards."""


def finite_number(value: Any) -> float | None:
    """Return a number as a float, numpy and torch scalars included; None for any other value and for NaN."""
    # Not "0.5", which float() would take. The usual kinds come first, as asking for a protocol takes long.
    if not isinstance(value, (float, int, SupportsFloat)):
        return None
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # a tensor of several elements
        return None
    return number if math.isfinite(number) else None


def foreign_score(value: Any, source: str) -> float:
    """Return a value from outside as a score: a finite float32, else a `FailedScore` with its source.

    Args:
        source: beginning of the reason, such as ``the service answered``.
    """
    number = None if isinstance(value, bool) else finite_number(value)
    if number is None or abs(number) > FLOAT32_MAX:
        return FailedScore(f"{source} {brief(value)}, which is no finite number")
    return number


def completion_text(completion: Text) -> str:
    """Return the text of a completion: the string itself, or the content of the model's last message.

    A string also contains the observations of its environment. In a conversation only assistant messages count,
    so text of a tool or an environment is not scored as the model's.
    """
    if isinstance(completion, str):
        return completion
    own = [message for message in completion if message.get("role", "assistant") == "assistant"]
    content = own[-1].get("content") if own else None
    if isinstance(content, str) or content is None:  # a message that only calls a tool has no content
        return content or ""
    return "".join(part.get("text", "") for part in content)


@dataclass(frozen=True)
class TrainerState:
    """Progress of the run, for reward functions that take `trainer_state`; the names are transformers'."""

    global_step: int
    """Optimizer steps done."""
    max_steps: int
    epoch: float


class RewardFunction(Protocol):
    """Scores completions; a plain function of this shape is a reward too. TRL users' functions work as is.

    Called with keyword arguments only: `prompts`, `completions`, `completion_ids`, every other dataset column
    by its name, and (where it accepts them) `trainer_state`, `log_metric`, `log_extra`. Returns one float, or
    None to abstain, per completion. May be async.

    A function that names them also gets facts about episodes, N values each: `turns` (texts of the model's
    turns), `model_masks` (True for tokens that the model wrote), `tool_calls` (dicts with turn, name,
    arguments, content, failure and seconds), `environment_rewards` (parts by name, times the environment's
    weight; a single number under ``""``; None: it abstained), `environment_info`, `row_names` (names of the
    data's rows, for messages) and `prompt_ends` (each prompt's last 32 tokens as the model reads them, as
    text). ``**columns`` does not get these.

    A function or class with the attribute ``per: "token" | "turn" | "separator"`` returns a list of floats per
    completion instead (or None): one for each token, for each turn of the model, or for each part of the
    completion's text between occurrences of its attribute ``separator: str``. Their sum is the completion's
    reward.

    A function that reads a column named by a parameter declares it in ``reads_columns: tuple[str, ...]``, as an
    attribute, or as a property of its class's `Config`, which `grpox validate` can read before the run.

    Its `Config` may have a method ``check_files() -> list[Problem]``, called while the run file is checked. It
    returns the input files and folders that the reward cannot use; a problem's key is the parameter's name.
    A method ``check_prompts(examples) -> list[Problem]`` gets a conversation of each shape in the rows, before
    the model is loaded, and returns problems with those that the reward cannot read.

    It may also have a method ``check_rows(rows) -> Iterable[Problem | str]``, called before a run with the name
    and the columns of each row. A problem refuses the row, and a string is a warning.

    ``uses_order: bool = False``, for tests: a completion's score depends on its place in the call.
    """

    def __call__(
        self,
        *,
        prompts: Sequence[Text],
        completions: Sequence[Text],
        completion_ids: Sequence[Sequence[int]],
        **columns: Any,
    ) -> Scores | Awaitable[Scores]: ...


# -- Generation ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Prompt:
    """One prompt to sample a group from."""

    group_id: int
    """Position of the group in its generation batch, over all ranks."""
    token_ids: tuple[int, ...]
    num_samples: int
    """Completions to sample (G in training)."""
    seed: int | None = None
    """Seed of this prompt's draws, which then do not depend on other prompts; None: the seed of the call
    determines them. A generator without seeds per prompt uses the seed of the call."""
    max_tokens: int | None = None
    """Longest completion of this prompt, in tokens; None: `sampling.max_completion_length`. Only a generator
    that provides "max_tokens" receives one."""
    row: int | None = None
    """The dataset's row; None if the prompt belongs to no dataset."""


FINISH_REASONS = ("stop", "length", "budget", "turns", "done", "error")
"""Reasons why a completion ended: the model's stop token; the longest length; no room for the next observation;
the most turns; the environment was done; the environment failed. A generator may give others."""


CallFailure = Literal["", "unknown", "arguments", "exception", "timeout", "memory", "limit"]
"""Reasons why a call of a tool gave an error text: no such tool; arguments that do not fit its signature; the
tool raised, took too long or held too much memory; too many calls in one turn. Empty if the call succeeded."""


@dataclass(frozen=True)
class ToolCall:
    """One call of a tool that the model wrote."""

    name: str
    arguments: str
    """Arguments as JSON text; the text of the call if it cannot be parsed."""


@dataclass(frozen=True)
class ToolResult:
    """The answer to one call of a tool."""

    call: ToolCall
    content: str
    """Text for the model: the result, or the error."""
    failure: CallFailure = ""
    seconds: float = 0.0
    turn: int = 0
    """Number of the turn that called it, from 0."""

    def plain(self) -> dict[str, Any]:
        """Return plain values by name: turn, name, arguments, content, failure, seconds."""
        return {
            "turn": self.turn,
            "name": self.call.name,
            "arguments": self.call.arguments,
            "content": self.content,
            "failure": self.failure,
            "seconds": self.seconds,
        }


@dataclass(frozen=True)
class Episode:
    """The conversation of a rollout with an environment, and the environment's facts about it."""

    environment: str
    """Label of the environment."""
    messages: tuple[Message, ...]
    """The conversation after the dataset's prompt: observations, and turns of the model as messages of the
    assistant."""
    results: tuple[ToolResult, ...] = ()
    """Answers to all calls of tools, in order."""
    cut: int = 0
    """Number of messages of the environment that were cut to `episodes.max_observation_tokens`."""
    rewards: Mapping[str, float] | None = None
    """Parts of the environment's own reward by name, a single number under ``""``; None: it abstained."""
    weight: float = 1.0
    """Factor of these parts in the reward function ``environment``, from the run file."""
    info: Mapping[str, Any] = field(default_factory=dict)
    """Facts that the environment gave at the end."""
    times: tuple[tuple[float, float], ...] = ()
    """Begin and end of each turn of the model, in seconds since the episode began."""
    failure: str = ""
    """Exception of the environment, as text, if that ended the episode."""
    lost: str = ""
    """Reason if the environment's process ended before the episode."""


@dataclass(frozen=True)
class Rollout:
    """One sampled completion, as token ids: nothing is ever tokenised a second time."""

    group_id: int
    sample: int
    """Position in its group, 0 to G-1; `group_id * G + sample` is its row in the generation batch."""
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    """One or more tokens of the model's vocabulary, the ending EOS included."""
    finish_reason: str
    """``stop``, ``length`` or another of `FINISH_REASONS`."""
    policy_version: int
    """Number of optimizer steps behind the weights that sampled it."""
    sampler_logprobs: tuple[float, ...] | None = None
    """Log-probability of each completion token under the sampling distribution, or None if unknown. Values of
    tokens that the model did not write are ignored; they may be NaN."""
    model_mask: tuple[bool, ...] | None = None
    """False for tokens that the model did not write (tools, environment); None if it wrote all."""
    turns: tuple[Turn, ...] = ()
    """The model's turns, in order; empty if the whole completion is one turn."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Further facts about the completion, as plain values, which are recorded."""
    episode: Episode | None = None
    """The conversation with an environment; None without one."""


@dataclass(frozen=True)
class ScoredRollout:
    """A rollout with its texts, rewards and advantage, as observers see it.

    Its rank builds it when reward functions have scored it. Before observers get it, the main rank adds prompt,
    advantage, columns and question.
    """

    rollout: Rollout
    prompt: str
    completion: str
    """All of its tokens as text, without special tokens."""
    rewards: Mapping[str, float | None]
    """Label of each reward function -> its score; None where it abstained."""
    reward: float
    """Weighted sum; NaN when every function abstained."""
    advantage: float
    """The mean over the tokens that the model wrote, if these have different advantages."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Values that reward functions logged for it through `log_extra`."""
    columns: Mapping[str, Any] = field(default_factory=dict)
    """The data's other columns in the prompt's row, such as the right answer."""
    question: str = ""
    """The user's last message in the prompt, without the chat template; empty: the prompt has none."""
    failed: tuple[str, ...] = ()
    """Labels of the reward functions that abstained because they failed."""
    token_rewards: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Label of a reward function that returned lists -> T numbers, each reward at the last token of its turn or
    part, 0 elsewhere; all NaN where the function abstained. Empty unless the advantage reads lists."""


@dataclass(frozen=True)
class GeneratorContext:
    """Arguments with which a generator starts in every process."""

    model_path: Path
    build_model: Callable[[], PreTrainedModel]
    """A plain, unsharded copy of the architecture; its weights are arbitrary before the first sync."""
    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: tuple[int, ...]
    device: torch.device
    rank: int
    world_size: int
    seed: int
    policy: PreTrainedModel
    """The module under training. Its parameters are this rank's shards: each forward gathers them layer by
    layer, a collective. For generators without weights of their own, which must restore its mode after use."""


@dataclass(frozen=True)
class GeneratorMemory:
    """Memory of a generator on each rank, for ``grpox plan --memory`` and for messages about memory."""

    holds: Literal["whole", "shards", "engine", "none"]
    """Content: a whole copy of the policy, its shards, a separate engine, or nothing."""
    shares: bool = False
    """The whole copy is the policy's own memory if that is whole, on a single rank without adapters."""
    together: int | None = None
    """Completions that a rank samples at a time, at most; None: all of its generation batch."""
    engine: str = ""
    """The engine's name in messages."""
    engine_ranks: int = 1
    """Number of ranks that share one engine."""
    cache: int | None = None
    """Bytes of the engine's keys and values; None: the rest of its part of the GPU, see `share_key`."""
    share_key: str = ""
    """The run file's key that sets the engine's part of the GPU."""
    cache_key: str = ""
    """The run file's key that sets `cache`."""
    sends: int = 0
    """Bytes that the first rank sends at a time from its GPU to engines elsewhere; 0: it sends none."""
    blocks_from: int = 0
    """Smallest number of weights of a linear layer that is stored twice while a CPU samples in float32: the
    second copy is in blocks for products. 0: none is."""


WeightStream = Iterator[tuple[str, "Tensor"]]
"""(name, full tensor) pairs gathered bucket by bucket: a collective, to be exhausted on every rank or begun on
none. They are the tensors of the model's checkpoint: parameters, tied ones once, and persistent buffers. The
tensors may be the policy's own memory: only read them, and copy any that you need after `sync`. On a single
rank they are its memory, and each update changes them. A generator that samples only between a sync and the
next update may keep tensors for which `grpox.toolkit.is_own_memory` is true."""


class Generator(Protocol):
    """Samples completions from the current policy. Every process has one.

    Its config model may have methods, called while the run file is checked. ``check_sampling(sampling:
    SamplingConfig) -> list[Problem]`` returns the settings of `sampling` that it cannot honour,
    ``check_run(config: RunConfig) -> list[Problem]`` its conflicts with the rest of the run.
    ``memory(gpu: bool) -> GeneratorMemory`` returns its memory; without this method the memory is unknown.

    The generator itself may have a method ``preflight(model: PreTrainedConfig) -> None``. It is called in the
    main process before the model is loaded, and raises an error if it can detect that the run would fail.

    A generator that provides "ahead" has a method ``begin(prompts, sampling, seed) -> Iterable[Rollout]``, with
    the arguments of `generate`. It starts sampling with the current weights and returns; sampling continues
    while the policy is updated. So it must not use collectives, not even while the rollouts are read. They
    are read once, perhaps after other calls of `generate`, `sleep`, `wake` and `sync`. A sync waits until they
    are sampled, so that none of them comes from the new weights. Samples that could not be drawn may be left
    out: the core then requests them by `generate`. Other errors are raised when the rollouts are read.
    """

    def start(self, context: GeneratorContext) -> None: ...

    def generate(self, prompts: Sequence[Prompt], sampling: SamplingConfig, seed: int) -> Iterable[Rollout]:
        """Return rollouts in order of completion; `prompts` are this rank's share and may be empty."""
        ...

    def sync(self, weights: WeightStream, version: int) -> None:
        """Load the policy's weights; later rollouts have this `version`."""
        ...

    def sleep(self) -> None:
        """Release memory if this is cheap: no completions are sampled until `wake`."""
        ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


# -- Data, optimizer -------------------------------------------------------------------------------------


class DatasetSource(Protocol):
    """A source of prompts: a dataset with a prompt column and the columns that the rewards read."""

    def load(self) -> datasets.Dataset | datasets.IterableDataset: ...


class OptimizerFactory(Protocol):
    """Builds the optimizer of the run.

    Under ZeRO-3 the optimizer of each rank gets a different flat part of a group's parameters.

    ``elementwise: bool = True``, for tests: each weight is changed independently of the others, so that steps
    are the same on any number of ranks.
    """

    def build(self, parameters: Iterable[Any], learning_rate: float) -> torch.optim.Optimizer: ...


class SchedulerFactory(Protocol):
    """Builds the learning-rate schedule of the run.

    ``exceeds: bool = False``, for tests: its rates may be larger than the learning rate of the run.
    """

    def build(self, optimizer: torch.optim.Optimizer, total_steps: int) -> Any: ...


# -- Observing -------------------------------------------------------------------------------------------


class Control(Protocol):
    """Access for observers to change the run; hooks that name the argument `control` receive it.

    Changes take effect before the next step, on all ranks, and are part of checkpoints.
    """

    @property
    def hyperparameters(self) -> Mapping[str, float]:
        """Current values of the settings that may change.

        They are ``learning_rate_factor``, ``beta`` if the run has a reference, and ``entropy_coef`` if it is
        not 0 and ``train.adaptive_entropy`` does not change it. Components can add parameters as ``loss.NAME``,
        ``advantage.NAME`` and ``correction.NAME``: their attribute ``hyperparameters`` names fields of their
        attribute `config`, which they must read at each use.
        """
        ...

    def set(self, name: str, value: float) -> None:
        """Change a hyperparameter.

        Raises:
            ValueError: no such hyperparameter, or a value that is not finite.
        """
        ...

    def stop(self, reason: str) -> None:
        """End the run after this step, as early stopping does."""
        ...


@dataclass(frozen=True)
class RunContext:
    """Facts about the run for lifecycle hooks."""

    config: RunConfig
    """Config with its secrets: pass it through `grpox.errors.redacted` before it is written or sent."""
    output_dir: Path
    total_steps: int
    world_size: int
    versions: Mapping[str, str]
    """Python, grpox, the libraries and every plugin distribution in use."""
    git_commit: str | None
    source: str
    """The run file or recipe, as the user named it."""
    resumed_at: int | None = None
    """Optimizer steps done in the checkpoint from which the run continues; 0 if it was started before and had
    no checkpoint; None for a new run."""
    metrics_bytes: int = 0
    """Size of metrics.jsonl at that step."""
    generations_before: int = 0
    """Number of generation batches collected before that step."""
    fingerprints: Mapping[str, str] = field(default_factory=dict)
    """Key of the run file, such as ``data.path`` -> fingerprint of the file or folder that it names."""
    started: float | None = None
    """Unix time at which the command began; None if it is not known."""


@dataclass(frozen=True)
class SweepContext:
    """A sweep, for lifecycle hooks."""

    config: RunConfig
    """Config of the first run, with its secrets, as in `RunContext`."""
    folder: Path
    """Folder that contains the folders of the runs."""
    source: str
    """The run file or recipe, as the user named it."""
    axes: Mapping[str, Sequence[str]]
    """Key of the run file -> its values, as the user typed them."""
    runs: int
    """Number of its runs."""


@dataclass(frozen=True)
class SweptRun:
    """Current state of one run of a sweep."""

    name: str
    """Name of its folder: ``learning_rate=1e-6_seed=0``."""
    setting: Mapping[str, str]
    """Key of each axis -> its value here."""
    status: Literal["FINISHED", "FAILED", "RUNNING", "WAITING", "KILLED"]
    value: float | None
    """Last recorded value of the metric that compares the runs; None if it was never recorded, or is NaN."""
    steps: int
    seconds: float | None
    """Seconds of training."""
    folder: str
    run_id: str | None
    """Id that a tracker gave the run (`grpox_tracked_run`); None if no tracker follows it."""
    error: str = ""


@dataclass(frozen=True)
class SweepResults:
    """All runs of a sweep, and the best of them."""

    run: str
    """The run file or recipe."""
    metric: str
    lowest: bool
    """True if the lowest value is the best."""
    runs: tuple[SweptRun, ...]

    @property
    def finished(self) -> tuple[SweptRun, ...]:
        """Runs that are complete."""
        return tuple(run for run in self.runs if run.status == "FINISHED")

    @property
    def best(self) -> SweptRun | None:
        """The best of the finished runs, the first of equal ones; None if none has a value."""
        done = [run for run in self.finished if run.value is not None]
        sign = -1 if self.lowest else 1
        return max(done, key=lambda run: sign * (run.value or 0.0), default=None)
