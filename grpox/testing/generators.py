"""Contract of every generator, as a suite of checks on the quickstart's model on CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import SkipTest

import torch
from torch import Tensor

from grpox.config import SamplingConfig
from grpox.contracts import Capability, Generator, GeneratorContext, Prompt, Rollout
from grpox.rollout.sampler import rollout_problem
from grpox.testing.conformance import Conformance, require

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SAMPLING = SamplingConfig(max_completion_length=6, temperature=0.8)
LARGEST_ERROR = {False: 1e-4, True: 1e-2}
"""Nats, in float32: of a generator with the trainer's own forward, and of one that provides other-numerics."""
ROUNDING = 1e-3
"""Largest log-probability that is still 0 but for rounding."""
TEXTS = ("12+7=", "5+5=", "48+37=")
SEED = 3


@dataclass(frozen=True)
class _Stage:
    """A generator, the quickstart's model as its policy, and prompts."""

    generator: Generator
    policy: PreTrainedModel
    stop_token_ids: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...]

    def sync(self, version: int) -> None:
        """Give the generator the policy's weights."""
        from grpox.policy.weight_stream import stream_weights

        self.generator.sync(stream_weights(self.policy), version)

    def sample(
        self,
        sampling: SamplingConfig,
        seed: int = SEED,
        samples: int = 4,
        max_tokens: Sequence[int] | None = None,
    ) -> list[Rollout]:
        """Sample rollouts of all prompts, in row order; `max_tokens` is of each prompt."""
        requests = self._requests(samples)
        if max_tokens is not None:
            requests = [replace(each, max_tokens=most) for each, most in zip(requests, max_tokens, strict=True)]
        return _in_row_order(self.generator.generate(requests, sampling, seed))

    def begin(self, sampling: SamplingConfig) -> Callable[[], list[Rollout]]:
        """Sample in the background, by a generator that provides "ahead"; returns a reader of the rollouts."""
        generator: Any = self.generator
        begun: Iterable[Rollout] = generator.begin(self._requests(4), sampling, SEED)
        return lambda: _in_row_order(begun)

    def _requests(self, samples: int) -> list[Prompt]:
        return [Prompt(group, ids, samples) for group, ids in enumerate(self.prompts)]

    @torch.no_grad()
    def logits(self, rollout: Rollout) -> Tensor:
        """Compute the policy's logits for each completion token: f32[T, V]."""
        ids = torch.tensor([[*rollout.prompt_ids, *rollout.completion_ids]])
        logits: Tensor = self.policy(input_ids=ids).logits[0].float()
        return logits[len(rollout.prompt_ids) - 1 : -1]

    @torch.no_grad()
    def change_policy(self) -> None:
        """Change the weights by noise, a quarter of their own standard deviation."""
        random = torch.Generator().manual_seed(0)
        for parameter in self.policy.parameters():
            noise = torch.randn(parameter.shape, generator=random, dtype=torch.float32)
            parameter.add_(0.25 * parameter.std(correction=0) * noise.to(parameter.dtype))


def _set_stage(generator: Any, texts: Sequence[str] = TEXTS) -> _Stage:
    """Start `generator` as a run on one rank does; it has weights from the first sync on."""
    # Imported here, as they take seconds, which the suites of other kinds need not wait for.
    from grpox.policy.models import architecture_of, stop_token_ids
    from grpox.runfile.load import load_run
    from grpox.training.inputs import open_model, open_tokenizer

    run = load_run("quickstart", [])
    tokenizer, model = open_tokenizer(run), open_model(run).eval()
    stops = stop_token_ids(model, tokenizer)
    context = GeneratorContext(
        model_path=Path(run.config.model.path),
        build_model=architecture_of(model),
        tokenizer=tokenizer,
        stop_token_ids=stops,
        device=torch.device("cpu"),
        rank=0,
        world_size=1,
        seed=0,
        policy=model,
    )
    if hasattr(generator, "preflight"):
        generator.preflight(model.config)
    generator.start(context)
    prompts = tuple(tuple(tokenizer(text, add_special_tokens=False).input_ids) for text in texts)
    return _Stage(generator, model, stops, prompts)


def _in_row_order(rollouts: Iterable[Rollout]) -> list[Rollout]:
    return sorted(rollouts, key=lambda rollout: (rollout.group_id, rollout.sample))


class GeneratorConformance(Conformance):
    """The checks of a generator. It is started once, and closed by `teardown_class`."""

    kind = "generator"
    _stage: ClassVar[_Stage | None] = None

    def test_runs(self) -> None:
        """Returns every sample of every prompt once, with the prompt's own tokens and the version's number."""
        stage = self._on_stage()
        rollouts = stage.sample(SAMPLING)
        returned = [(rollout.group_id, rollout.sample) for rollout in rollouts]
        wanted = [(group, sample) for group in range(len(stage.prompts)) for sample in range(4)]
        require(returned == wanted, f"of (group, sample) {wanted} it returned {returned}")
        for rollout in rollouts:
            same = tuple(rollout.prompt_ids) == stage.prompts[rollout.group_id]
            advice = "nothing is tokenised twice: return the prompt's ids as they came"
            require(same, "a rollout has other prompt tokens than its prompt", rollout, advice)
            check_rollout(rollout, version=0)

    def test_ends(self) -> None:
        """A completion ends with its stop token, or at the maximal length, and says which."""
        stage = self._on_stage()
        for length in (SAMPLING.max_completion_length, 1):
            sampling = SAMPLING.model_copy(update={"max_completion_length": length})
            for rollout in stage.sample(sampling):
                _check_end(rollout, length, stage.stop_token_ids)

    def test_own_lengths(self) -> None:
        """Ends a completion at its prompt's own longest length, if it provides max_tokens."""
        if Capability.MAX_TOKENS not in self.bound.provides:
            raise SkipTest("it does not provide max_tokens")
        stage = self._on_stage()
        limits = [1 + group % 3 for group in range(len(stage.prompts))]
        for rollout in stage.sample(SAMPLING.model_copy(update={"temperature": 2.0}), max_tokens=limits):
            written, most = sum(_model_mask(rollout)), limits[rollout.group_id]
            require(written <= most, f"{written} tokens, where Prompt.max_tokens is {most}", rollout)
            ended = rollout.finish_reason != "length" or written == most
            require(ended, f"it ended by 'length', before Prompt.max_tokens {most}", rollout)

    def test_log_probabilities(self) -> None:
        """Reports the log-probability of each token under the model, at the temperature it was drawn with."""
        if Capability.LOGPROBS not in self.bound.provides:
            raise SkipTest("it does not provide logprobs")
        stage = self._on_stage()
        for temperature in (SAMPLING.temperature, 2.0):  # at the lower one, many tokens are nearly certain
            self._check_log_probabilities(stage, temperature)

    def test_greedy(self) -> None:
        """Nearly at temperature 0 it takes the likeliest token."""
        stage = self._on_stage()
        for rollout in stage.sample(SAMPLING.model_copy(update={"temperature": 1e-4}), samples=1):
            written = torch.tensor(_model_mask(rollout))
            drawn = torch.tensor(rollout.completion_ids)[written].tolist()
            likeliest = stage.logits(rollout).argmax(1)[written].tolist()
            require(drawn == likeliest, f"it drew {drawn}; likeliest are {likeliest}", rollout)

    def test_seeds(self) -> None:
        """The same seed draws the same tokens, and another one others."""
        stage = self._on_stage()
        sampling = SAMPLING.model_copy(update={"temperature": 2.0})
        first, again, other = (_drawn(stage.sample(sampling, seed)) for seed in (1, 1, 2))
        advice = "draw from a generator seeded by `seed` and the prompt's group_id, not from the global one"
        require(first == again, "the same seed draws other tokens a second time", advice=advice)
        require(first != other, "another seed draws the same tokens", advice="use the argument `seed`")

    def test_no_prompts(self) -> None:
        """Takes a share without prompts, as a rank of many has at times."""
        rollouts = list(self._on_stage().generator.generate([], SAMPLING, 0))
        require(not rollouts, "for no prompts it returned rollouts")

    def test_sleep_and_wake(self) -> None:
        """After sleep and wake it samples as before."""
        stage = self._on_stage()
        before = _drawn(stage.sample(SAMPLING))
        stage.generator.sleep()
        stage.generator.wake()
        same = _drawn(stage.sample(SAMPLING)) == before
        require(same, "after sleep() and wake() it draws other tokens from the same seed")

    def test_versions(self) -> None:
        """After a sync it samples from the new weights, and says so."""
        stage = self._on_stage()
        stage.change_policy()
        stage.sync(7)
        versions = {rollout.policy_version for rollout in stage.sample(SAMPLING)}
        what = f"after sync(weights, 7) rollouts are of version {sorted(versions)}"
        require(versions == {7}, what, advice="keep the version that sync() is given")
        if Capability.LOGPROBS in self.bound.provides:
            self._check_log_probabilities(stage)
        memory = getattr(self.bound.config, "memory", None)
        if memory is not None and memory(False).holds == "shards":
            return
        # It goes on with the weights of the last sync while the policy is updated.
        before = _drawn(stage.sample(SAMPLING))
        stage.change_policy()
        same = _drawn(stage.sample(SAMPLING)) == before
        advice = "copy what sync() is given: the tensors may be the policy's own memory"
        require(same, "an update of the policy without a sync changes its samples", advice=advice)
        stage.sync(7)

    def test_ahead(self) -> None:
        """Rollouts begun before a sync are sampled with the weights before it."""
        if Capability.AHEAD not in self.bound.provides:
            raise SkipTest("it does not sample ahead")
        stage = self._on_stage()
        stage.sync(8)
        wanted, read = stage.sample(SAMPLING), stage.begin(SAMPLING)
        stage.change_policy()
        stage.sync(9)
        rollouts = read()
        versions = {rollout.policy_version for rollout in rollouts} - {8}
        what = f"begun after sync(weights, 8), rollouts are of version {sorted(versions)}"
        require(not versions, what, advice="sync() waits for what was begun")
        same = _drawn(rollouts) == _drawn(wanted)
        require(same, "begin() draws other samples than generate() with the same weights and seed")

    @classmethod
    def teardown_class(cls) -> None:
        """Close the generator."""
        if cls._stage is not None:
            cls._stage.generator.close()
            cls._stage = None

    def _on_stage(self) -> _Stage:
        cls = type(self)
        if cls._stage is None:
            cls._stage = _set_stage(self.build())
            cls._stage.sync(0)
        return cls._stage

    def _check_log_probabilities(self, stage: _Stage, temperature: float = SAMPLING.temperature) -> None:
        largest, allowed = 0.0, LARGEST_ERROR[Capability.OTHER_NUMERICS in self.bound.provides]
        for rollout in stage.sample(SAMPLING.model_copy(update={"temperature": temperature})):
            reported = torch.tensor(rollout.sampler_logprobs or ())
            is_whole = len(reported) == len(rollout.completion_ids)
            require(is_whole, "it provides logprobs and a rollout has none, or not one a token", rollout)
            expected = torch.log_softmax(stage.logits(rollout) / temperature, dim=1)
            chosen = expected.gather(1, torch.tensor(rollout.completion_ids).unsqueeze(1)).squeeze(1)
            error = float((reported - chosen)[torch.tensor(_model_mask(rollout))].abs().max())
            shown = "  ".join(f"{value:.4f}" for value in chosen.tolist())
            advice = "they are of softmax(logits / temperature), of the weights of the last sync"
            what = f"its log-probabilities are off by {error:.2g} nats; allowed is {allowed:g}"
            require(error <= allowed, what, f"{rollout}\nthe model's: {shown}", advice)
            largest = max(largest, error)
        self.notes.append(f"largest difference from the model's: {largest:.1e} nats")


def _check_end(rollout: Rollout, length: int, stops: Sequence[int]) -> None:
    ids = rollout.completion_ids
    if rollout.turns or rollout.finish_reason not in ("stop", "length"):  # it ends as its environment says
        return
    require(1 <= len(ids) <= length, f"a completion has {len(ids)} tokens of at most {length}", rollout)
    stopped = ids[-1] in stops
    goes_on = any(token in stops for token in ids[:-1])
    require(not goes_on, "a completion goes on after its stop token", rollout)
    advice = "the ending EOS belongs to the completion: it is trained on"
    require(stopped or len(ids) == length, "a completion ends early and without a stop token", rollout, advice)
    is_right = rollout.finish_reason == ("stop" if stopped else "length")
    require(is_right, f"its finish_reason is {rollout.finish_reason!r}", rollout)


def check_rollout(rollout: Rollout, version: int) -> None:
    """Check a rollout that weights of `version` have just sampled, apart from its end.

    Raises:
        Violation: its mask, log-probabilities, versions or turns do not fit its tokens.
    """
    require(not (problem := rollout_problem(rollout)), f"a rollout's {problem}", rollout)
    mask = _model_mask(rollout)
    advice = "model_mask is True for tokens that the model wrote, the ending EOS included; None: it wrote all"
    has_all = rollout.finish_reason != "stop" or mask[-1]
    require(has_all, "a rollout's model_mask leaves out the EOS that the model wrote", rollout, advice)
    if rollout.sampler_logprobs is not None:
        written = [value for value, is_model in zip(rollout.sampler_logprobs, mask, strict=True) if is_model]
        sound = all(math.isfinite(value) and value <= ROUNDING for value in written)
        advice = "log-probabilities are finite and at most 0"
        require(sound, "a rollout has a sampler log-probability that is none", rollout, advice)
    what = f"after a sync of version {version} a rollout is of version {rollout.policy_version}"
    require(rollout.policy_version == version, what, rollout, "keep the version that sync() is given")
    if not rollout.turns:
        return
    versions = [turn.policy_version for turn in rollout.turns]
    what = f"turns of versions {versions} are in a rollout of version {rollout.policy_version}"
    require(max(versions) <= rollout.policy_version, what, rollout)
    ends = rollout.turns[-1].finish_reason, rollout.finish_reason
    what = "the last turn ended by {!r}, the rollout by {!r}".format(*ends)
    require(ends[0] == ends[1] or ends[1] not in ("stop", "length"), what, rollout)


def _model_mask(rollout: Rollout) -> Sequence[bool]:
    """Return the mask of the tokens that the model wrote."""
    return rollout.model_mask or (True,) * len(rollout.completion_ids)


def _drawn(rollouts: Sequence[Rollout]) -> list[tuple[int, ...]]:
    return [tuple(rollout.completion_ids) for rollout in rollouts]
