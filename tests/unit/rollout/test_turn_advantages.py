"""Advantages of turns and tokens, from rewards in lists and of turns: numbers worked by hand."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from test_sampler import ALONE, Letters, engine

from grpox.config import SamplingConfig
from grpox.contracts import AdvantageInputs, Episode, Rollout, ToolCall, ToolResult, TrainerState, Turn
from grpox.data.prompts import PromptSet
from grpox.errors import ConfigError, RunFailed
from grpox.plugins.component import bind_object, takes_inputs
from grpox.policy.batch import collate, samples_of
from grpox.rollout.collector import Collector, GenerationBatch, Scorer, check_same_data
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.lists import ListShape, lengths_of
from grpox.rollout.sampler import CompletionSampler

STATE = TrainerState(global_step=4, max_steps=10, epoch=0.0)
TURNS = (Turn(0, 2, "stop", 0, reward=1.0), Turn(3, 5, "done", 0, reward=-2.0))
MASK = (True, True, False, True, True)
WHOLE = (Turn(0, 3, "stop", 0),)


class Scripted:
    """Returns these rollouts, whatever it is asked for."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = rollouts

    def sync(self, weights, version): ...
    def wake(self): ...
    def sleep(self): ...
    def generate(self, prompts, sampling, seed):
        return list(self.rollouts)


def rollout(sample: int, ids: Sequence[int], group: int = 0, **fields: Any) -> Rollout:
    return Rollout(group, sample, (1 + group,), tuple(ids), fields.pop("finish_reason", "stop"), 0, **fields)


def collect(
    scaler: Any, rollouts: Sequence[Rollout], *rewards: Callable[..., Any], indices: Sequence[int] = (0,)
) -> GenerationBatch:
    rows = datasets.Dataset.from_dict({"prompt": list("abc"), "difficulty": [0.5, 2.0, 4.0]})
    prompts = PromptSet(rows, "prompt", Letters())
    rollouts = [replace(each, prompt_ids=prompts.token_ids(indices[each.group_id])) for each in rollouts]
    sampler = CompletionSampler(engine(), Scripted(rollouts), ALONE, seed=0)  # type: ignore[arg-type]
    named = [NamedReward(function.__name__, function) for function in rewards]
    size = len(rollouts) // len(indices)
    collector = Collector(sampler, Scorer(named), prompts, scaler, SamplingConfig(), size)
    batch = collector.collect(0, indices, STATE)
    collector.metrics(batch)
    return batch


def conversation(**fields: Any) -> Episode:
    return Episode("lake", fields.pop("messages", ({"role": "assistant", "content": "a"},)), **fields)


def answered(**fields: Any) -> Episode:
    return conversation(results=(ToolResult(ToolCall("add", "{}"), "", **fields),))


ODD = {"role": "user", "content": {1, 2}}


def flat(completions, **_):
    return [0.0] * len(completions)


class TurnReturns:
    """Return-to-go of the turns' own rewards: A_k = sum over j >= k of r_j."""

    per = "turn"

    def scale(self, inputs: AdvantageInputs) -> list[torch.Tensor]:
        rewards = [torch.tensor([turn.reward or 0.0 for turn in turns]) for turns in inputs.turns]
        return [each.flip(0).cumsum(0).flip(0) for each in rewards]


class TokenReturns:
    """Return-to-go of all lists: A_t = sum over s >= t of r_s."""

    per = "token"

    def scale(self, inputs: AdvantageInputs) -> list[torch.Tensor]:
        returns = []
        for row in range(len(inputs.rewards)):
            total = torch.zeros(int(inputs.lengths[row]))
            for rewards in inputs.token_rewards.values():
                total += rewards[row].nan_to_num(nan=0.0).flip(0).cumsum(0).flip(0)
            returns.append(total)
        return returns


def test_a_turns_advantage_is_for_all_of_its_tokens_and_others_have_none() -> None:
    batch = collect(TurnReturns(), [rollout(0, [1, 2, 3, 4, 5], turns=TURNS, model_mask=MASK)], flat)
    # Returns to go are 1 - 2 = -1 and -2; the third token is the environment's.
    assert batch.scaled.tokens is not None
    assert batch.scaled.tokens[0].tolist() == [-1, -1, 0, -2, -2]
    assert batch.scaled.values.tolist() == [-1.5]  # the mean over the four tokens of the model
    (sample,) = samples_of(batch.rollouts, batch.scaled.of_rows([0]))
    assert sample.token_mask.tolist() == list(MASK)
    padded = collate([*samples_of([rollout(0, [1])], [0.5]), sample], torch.device("cpu"))
    assert padded.advantages.tolist() == [[0.5, 0, 0, 0, 0], [-1, -1, 0, -2, -2]]


def per_token(completion_ids, **_):
    return [[0.5 * token for token in ids] for ids in completion_ids]


per_token.per = "token"


def test_token_rewards_become_returns_to_go_and_their_sum_the_reward() -> None:
    batch = collect(TokenReturns(), [rollout(0, [1, 2, 3]), rollout(1, [4])], per_token)
    assert batch.rewards.tolist() == [[3.0], [2.0]]
    assert batch.scaled.tokens is not None
    assert [each.tolist() for each in batch.scaled.tokens] == [[3.0, 2.5, 1.5], [2.0]]
    assert batch.scaled.values.tolist() == pytest.approx([7 / 3, 2.0])


def by_part(completions, **_):
    """1, 2, 3 ... for the parts of each text."""
    return [[float(n) for n, _ in enumerate(text.split("bb"), 1)] for text in completions]


by_part.per, by_part.separator = "separator", "bb"


class Seen:
    """Keeps what it is given, and changes all of it."""

    def scale(self, inputs: AdvantageInputs) -> torch.Tensor:
        self.inputs = AdvantageInputs(**{**vars(inputs), "rewards": inputs.rewards.clone()})
        self.columns = {name: list(values) for name, values in inputs.columns.items()}
        for values in inputs.columns.values():
            values.clear()  # type: ignore[attr-defined]
        inputs.rewards.fill_(7)
        return torch.zeros(len(inputs.lengths))


def test_a_scaler_is_given_all_of_the_batch_as_its_own() -> None:
    episode = rollout(0, [1, 2, 3, 4, 5], turns=TURNS, model_mask=MASK)
    others = [rollout(1, [2, 2, 1, 0]), rollout(0, [1], 1), rollout(1, [1, 2, 2], 1)]

    def turnwise(completions, **_):
        return [[1.0, 10.0], None, [3.0], [4.0]]

    turnwise.per = "turn"  # type: ignore[attr-defined]
    scaler = Seen()
    batch = collect(scaler, [episode, *others], turnwise, by_part, indices=[2, 0])
    seen = scaler.inputs
    assert seen.rewards[:, 0].tolist()[::2] == [11, 3]
    assert math.isnan(seen.rewards[1, 0])
    assert seen.rewards[:, 1].tolist() == [1, 3, 1, 3]
    assert (seen.group_ids.tolist(), seen.prompt_ids.tolist()) == ([0, 0, 1, 1], [2, 2, 0, 0])
    assert (seen.lengths.tolist(), seen.step, seen.weights.tolist()) == ([5, 4, 1, 3], 5, [1, 1])
    assert [mask.tolist() for mask in seen.model_masks] == [list(MASK), [True] * 4, [True], [True] * 3]
    assert scaler.columns == {"difficulty": [4.0, 4.0, 0.5, 0.5]}
    assert seen.turns[0] == TURNS
    assert seen.turns[1] == (Turn(0, 4, "stop", 0),)
    at = {label: [each.tolist() for each in rows] for label, rows in seen.token_rewards.items()}
    assert at["turnwise"][0] == [0, 1, 0, 0, 10]
    assert all(map(math.isnan, at["turnwise"][1]))
    assert at["turnwise"][2:] == [[3], [0, 0, 4]]
    # "bba" + a special token: an empty part, at the first token; then "a", which ends with the last token.
    assert at["by_part"][1:] == [[1, 0, 0, 2], [1], [1, 0, 2]]
    assert batch.rewards[0].tolist() == [11, 1]  # what the scaler did to its own changed nothing


@pytest.mark.parametrize(
    ("text", "tokens", "places"),
    [
        ("ab|cd|e", ["ab|", "cd", "|e"], [0, 1, 2]),
        ("|a", ["|a", "<eos>"], [0, 1]),
        ("é|b", ["\xc3", "\xa9", "|b"], [1, 2]),  # a character of two tokens
        ("a||b", ["a|", "|b"], [0, 0, 1]),
    ],
)
def test_the_last_token_of_a_part_is_the_one_that_completes_it(
    text: str, tokens: list[str], places: list[int]
) -> None:
    def decode(ids: Sequence[int]) -> str:
        spelled = "".join(tokens[i] for i in ids if tokens[i] != "<eos>")
        return spelled.encode("latin-1" if "\xc3" in tokens else "utf-8").decode("utf-8", "replace")

    shape = ListShape("separator", "|")
    assert shape.rated_tokens(rollout(0, range(len(tokens))), text, decode) == places
    assert lengths_of(shape, {"completions": [text], "completion_ids": [()]}) == [len(places)]


class Returns:
    """Returns what it was built with."""

    def __init__(self, per: str, result: Any) -> None:
        self.per, self.result = per, result

    def scale(self, inputs: AdvantageInputs) -> Any:
        return self.result


@pytest.mark.parametrize(
    ("per", "result", "told"),
    [
        ("turn", torch.zeros(1), r"returned \(1,\); per 'turn' is a list of 1 tensors"),
        ("turn", [], "returned 0 values"),
        ("turn", [torch.zeros(3)], r"returned \(3,\) for sample 0 of group 0; one number per turn is \(2,\)"),
        ("token", [torch.zeros(2)], r"returned \(2,\) for sample 0 of group 0; one number per token is \(5,\)"),
        ("token", [[0.0] * 5], "returned list for sample 0"),
        ("token", [torch.full((5,), math.nan)], "returned nan for sample 0 of group 0"),
        ("completion", [torch.zeros(1)], r"returned list; one number per completion is \(1,\)"),
    ],
)
def test_a_wrong_result_is_refused_by_the_scalers_name(per: str, result: Any, told: str) -> None:
    episode = rollout(0, [1, 2, 3, 4, 5], turns=TURNS, model_mask=MASK)
    with pytest.raises(RunFailed, match=f"advantage 'Returns' {told}"):
        collect(Returns(per, result), [episode], flat)


@pytest.mark.parametrize(
    ("method", "form"),
    [
        (lambda self, rewards, weights, group_ids: 0, False),
        (lambda self, rewards, weights, group_ids, eps=0.1: 0, False),
        (lambda self, *arguments: 0, False),
        (staticmethod(lambda rewards, weights, group_ids: 0), False),
        (lambda self, inputs: 0, True),
        (lambda self, inputs, eps=0.1: 0, True),
        (lambda self, rewards, weights: 0, None),
        (lambda self, a, b, c, d: 0, None),
        (lambda self, inputs, *, eps: 0, None),
    ],
)
def test_the_number_of_parameters_tells_the_forms_apart(method: Any, form: bool | None) -> None:
    kind = type("Scaler", (), {"scale": method})
    assert takes_inputs(kind) is form
    assert takes_inputs(kind()) is form
    if form is None:
        with pytest.raises(ConfigError, match=r"scale\(inputs\) or scale\(rewards, weights, group_ids\)"):
            bind_object("advantage", kind, {}, "advantage", "Scaler")


@pytest.mark.parametrize(
    ("members", "told"),
    [
        ({"per": "word", "scale": lambda self, inputs: 0}, "'completion' or 'turn' or 'token'"),
        ({"per": "turn", "scale": lambda self, rewards, weights, group_ids: 0}, r"scale\(inputs\)"),
    ],
)
def test_a_wrong_per_of_a_scaler_is_refused(members: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        bind_object("advantage", type("Scaler", (), members), {}, "advantage", "Scaler")


class Group:
    """r, in the form of three arguments."""

    def scale(self, rewards, weights, group_ids):
        return rewards.sum(1)


def test_a_scaler_of_three_arguments_gets_the_sums_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        batch = collect(Group(), [rollout(0, [1, 2]), rollout(1, [1])], per_token)
    assert batch.scaled.values.tolist() == [1.5, 0.5]
    assert "sums of the lists that per_token returns" in caplog.text
    assert not any(row.token_rewards for row in batch.rows)


@pytest.mark.parametrize(
    ("per", "returned", "told"),
    [
        (None, [1.0], r"\[1.0\] \(list\) for completion 0.* attribute per"),
        ("token", 1.0, r"1.0 \(float\) for completion 0; wanted is a list of 2"),
        ("token", [1.0], "1 numbers for completion 0; wanted is a list of 2"),
        ("token", [1.0, math.inf], r"\[1.0, inf\] \(list\) for completion 0; wanted is a list of 2"),
    ],
)
def test_lists_of_the_wrong_kind_are_refused_by_label(per: str | None, returned: Any, told: str) -> None:
    def lists(completions, **_):
        return [returned] * len(completions)

    lists.per = per  # type: ignore[attr-defined]
    with pytest.raises(RunFailed, match=f"reward 'lists' returned {told}"):
        collect(TokenReturns(), [rollout(0, [1, 2])], lists)


@pytest.mark.parametrize(
    "attributes", [{"per": "word"}, {"per": "separator"}, {"per": "separator", "separator": ""}]
)
def test_a_wrong_per_of_a_reward_is_refused(attributes: dict[str, str]) -> None:
    with pytest.raises(ValueError, match="per"):
        ListShape.of(SimpleNamespace(**attributes))


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model_mask": (True,)}, "model_mask has 1 values for 3 completion tokens"),
        ({"model_mask": (False, False, False)}, "model_mask is False for every token"),
        ({"sampler_logprobs": (0.0,)}, "sampler_logprobs has 1 values for 3"),
        ({"finish_reason": ""}, "finish_reason is '' and no text"),
        ({"turns": (Turn(0, 4, "stop", 0),)}, "turn 0 is tokens 0 to 4, after token 0 and of 3"),
        ({"turns": (Turn(1, 1, "stop", 0),)}, "turn 0 is tokens 1 to 1"),
        ({"turns": (Turn(0, 2, "stop", 0), Turn(1, 3, "stop", 0))}, "turn 1 is tokens 1 to 3, after token 2"),
        ({"turns": (Turn(0, 2, "stop", 0),)}, "model_mask is True at token 2, which is in no turn"),
        (
            {"turns": WHOLE, "model_mask": (True, False, True)},
            "model_mask is False at token 1, which is in a turn",
        ),
        ({"turns": (Turn(0, 3, "stop", 0, math.nan),)}, "turn 0 has the reward nan"),
        ({"extra": {"score": np.float64(1)}}, r"extra.score is .*float64"),
        ({"episode": conversation(messages=("hi",))}, "episode has the message 'hi', which is no dict"),
        ({"episode": conversation(messages=({"content": "hi"},))}, "episode has the message .* with a role"),
        ({"episode": conversation(messages=(ODD,))}, r"episode.messages.content is \{1, 2\} \(set\)"),
        ({"episode": answered(turn=1)}, "episode has a call of tool 'add' in turn 1 of 1"),
        (
            {"episode": answered(failure="late")},
            "episode .* with failure 'late'; it is unknown, .*, limit or empty",
        ),
        ({"episode": conversation(times=((0.0, 1.0),) * 2)}, "episode has times of 2 turns, and there are 1"),
        ({"episode": conversation(rewards={"a": "1"})}, "episode.rewards is .*, not numbers by name"),
        ({"episode": conversation(info={"at": np.int64(3)})}, "episode.info.at is .*int64"),
        ({"episode": conversation(weight=math.inf)}, "episode has the weight inf"),
    ],
)
def test_a_rollout_that_contradicts_itself_is_refused_by_the_generators_name(
    fields: dict[str, Any], told: str
) -> None:
    with pytest.raises(
        RunFailed, match=rf"generator 'Scripted' returned a rollout \(group 0, sample 0\) whose {told}"
    ):
        collect(Group(), [rollout(0, [1, 2, 3], **fields)], flat)


def test_prompts_are_those_of_the_rollouts_tokens_as_an_environment_may_begin_them_differently() -> None:
    ids = [(1,), (1, 2), (1, 3)]
    own = [replace(rollout(n, [1], episode=conversation()), prompt_ids=each) for n, each in enumerate(ids)]
    prompts = PromptSet(datasets.Dataset.from_dict({"prompt": ["a"]}), "prompt", Letters())
    sampler = CompletionSampler(engine(), Scripted(own), ALONE, seed=0)  # type: ignore[arg-type]
    collector = Collector(sampler, Scorer([NamedReward("flat", flat)]), prompts, Group(), SamplingConfig(), 3)
    assert [row.prompt for row in collector.collect(0, [0], STATE).rows] == ["a", "ab", "ac"]


def test_an_episode_without_a_flaw_arrives_as_it_is() -> None:
    episode = conversation(info={"success": True, "path": [1, "a", None]}, rewards={"": 1, "b": math.nan})
    batch = collect(Group(), [rollout(0, [1, 2], episode=episode), rollout(1, [1])], flat)
    assert batch.rollouts[0].episode == episode


def test_ranks_that_read_other_rows_end_the_run() -> None:
    check_same_data(["x", "x", ""])  # the last one sampled nothing
    with pytest.raises(RunFailed, match="data differs by rank: ranks 0, 2 and 1"):
        check_same_data(["x", "y", "x"])
