"""Groups that teach nothing are replaced by others: which, by which, for how long, and alike on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from reward_tables import row_of
from test_prefetch import Ahead, Policy, Prompts, trainer_of
from test_sampler import ALONE, STATE, collected, on_two_ranks

from grpox.config import SamplingConfig
from grpox.contracts import AdvantageInputs, Rollout, ScoredRollout, Turn
from grpox.data.schedule import BatchPlan, PromptCursor, PromptSampler, Schedule
from grpox.errors import RunFailed
from grpox.rollout.collector import Collector, Scorer
from grpox.rollout.dynamic_sampling import in_group, refill, signal_of
from grpox.rollout.rewards import NamedReward
from grpox.rollout.sampler import CompletionSampler
from grpox.training.trainer import Trainer
from grpox_advantages.baselines import Opo
from grpox_advantages.configs import GigpoConfig, GroupConfig, ReturnToGoConfig
from grpox_advantages.scalers import Group
from grpox_advantages.turns import Gigpo, ReturnToGo

Groups = tuple[list[int], list[ScoredRollout]]


def groups(*rewards: tuple[float, ...], first: int = 0) -> Groups:
    """Groups with these rewards, of the prompts from `first` on."""
    rows = [
        row_of(Rollout(group, sample, (first + group,), (1,), "stop", 0), {"r": reward})
        for group, of_group in enumerate(rewards)
        for sample, reward in enumerate(of_group)
    ]
    return list(range(first, first + len(rewards))), rows


def refilled(batch: Groups, *rounds: Groups) -> tuple[list[ScoredRollout], dict[str, float], list[int]]:
    """Refill the batch; return what was dropped, metrics, and how many prompts were drawn in each round."""
    drawn: list[int] = []

    def sample(number: int, count: int) -> Groups:
        drawn.append(count)
        assert number == len(drawn)
        return rounds[number - 1]

    def find_flat(indices: Sequence[int], rows: Sequence[ScoredRollout]) -> list[bool]:
        assert [row.rollout.group_id for row in rows[::2]] == list(range(len(indices)))
        return [first.reward == second.reward for first, second in zip(rows[::2], rows[1::2], strict=True)]

    return *refill(*batch, len(rounds), sample, find_flat), drawn


def test_flat_groups_are_replaced_in_the_order_of_drawing() -> None:
    indices, rows = batch = groups((0, 1), (1, 1), (0, 1), (0, 0), (1, 1))
    rounds = groups((0, 0), (2, 3), (4, 5), first=10), groups((6, 7), first=20)
    dropped, metrics, drawn = refilled(batch, *rounds)
    assert drawn == [3, 1]
    assert indices == [0, 11, 2, 12, 20]
    assert [row.rewards["r"] for row in rows] == [0, 1, 2, 3, 0, 1, 4, 5, 6, 7]
    places = [(row.rollout.group_id, row.rollout.sample) for row in rows]
    assert places == [(group, sample) for group in range(5) for sample in range(2)]
    assert [row.rollout.prompt_ids for row in rows[::2]] == [(0,), (11,), (2,), (12,), (20,)]
    assert metrics == {
        "dynamic_sampling/rounds": 2,
        "dynamic_sampling/replaced": 0.6,
        "dynamic_sampling/prompts": 9,
    }
    # All that was sampled is in the batch or dropped: two rows of each of nine prompts.
    assert len(dropped) == 18 - 10


def test_what_the_rounds_do_not_replace_stays_as_it_was() -> None:
    indices, rows = batch = groups((1, 1), (0, 0), (0, 1))
    _, metrics, drawn = refilled(batch, groups((0, 0), (2, 3), first=10))
    assert drawn == [2]
    assert indices == [11, 1, 2]
    assert [row.rewards["r"] for row in rows] == [2, 3, 0, 0, 0, 1]
    assert metrics["dynamic_sampling/replaced"] == pytest.approx(1 / 3)


# -- Which groups are flat -------------------------------------------------------------------------------

NAN = float("nan")


def episode(
    sample: int, rewards: tuple[float | None, ...], states: str = "", score: float = 1.0, unweighed: float = 0.0
) -> ScoredRollout:
    """An episode with a reward for each turn, that of a function a, and that of b, which has weight 0."""
    keys = dict(enumerate(states))
    turns = tuple(Turn(n, n + 1, "stop", 0, reward, keys.get(n)) for n, reward in enumerate(rewards))
    rollout = Rollout(0, sample, (1,), (1,) * len(turns), "stop", 0, turns=turns)
    return replace(row_of(rollout, {"a": score, "b": unweighed}), reward=score)


ONCE_AND_TWICE = [episode(0, (0.0,)), episode(1, (0.0, 0.0))]
GIGPO, TO_GO = Gigpo(GigpoConfig()), ReturnToGo(ReturnToGoConfig(gamma=0.9))


@pytest.mark.parametrize(
    ("scaler", "group", "flat"),
    [
        (TO_GO, ONCE_AND_TWICE, False),
        (GIGPO, [episode(0, (0.0,), "a"), episode(1, (0.0, 0.0), "ab")], False),
        (ReturnToGo(ReturnToGoConfig()), ONCE_AND_TWICE, True),
        (Group(GroupConfig()), ONCE_AND_TWICE, True),
        (TO_GO, [episode(0, (0.0, 1.0)), episode(1, (1.0, 0.0))], False),
        # The same turns, of which one episode begins both in one state.
        (GIGPO, [episode(0, (0.0, 0.0), "ab"), episode(1, (0.0, 0.0), "ab")], True),
        (GIGPO, [episode(0, (0.0, 0.0), "ab"), episode(1, (0.0, 0.0), "aa")], False),
        (GIGPO, [episode(0, (0.0,), "a"), episode(1, (0.0,), "a", unweighed=5.0)], True),
        (TO_GO, [episode(0, (0.0,)), episode(1, (0.0,), score=0.5)], False),
        (TO_GO, [episode(0, (0.0,)), episode(1, (0.0,), score=NAN, unweighed=NAN)], True),
    ],
)
def test_a_group_is_flat_if_the_runs_own_scaler_gives_no_advantage(
    scaler: Any, group: list[ScoredRollout], flat: bool
) -> None:
    made = collector(0, ALONE, scaler, NamedReward("a", numbered), NamedReward("b", numbered, weight=0.0))
    others = [episode(0, (0.0, 1.0), "ab"), episode(1, (0.0, 0.0), "ab", score=0.0)]
    rows = [*others, *(in_group(row, 1) for row in group)]
    assert made.find_flat(STATE, [3, 4], rows) == [False, flat]


def test_a_scaler_that_is_asked_keeps_its_state() -> None:
    class Counts:
        calls = 0

        def scale(self, inputs: AdvantageInputs) -> Any:
            self.calls += 1
            return inputs.rewards[:, 0] - self.calls

    scaler: Any = Counts()
    made, draws = collector(scaler=scaler), in_order()
    batch = made.collect(0, draws.batch(), STATE, draw=draws.more)
    assert scaler.calls == 1
    assert not (batch.scaled.values.reshape(-1, 2) == 0).all(dim=1).any()


@pytest.mark.parametrize(
    ("rewards", "flat"),
    [
        # Weights 1, 2 and 0. The flags are for "sum" and "functions".
        (((0.0, 1.0, 0.0), (0.0, 1.0, 0.0)), (True, True)),
        (((0.0, 1.0, 0.0), (2.0, 0.0, 0.0)), (True, False)),  # both sums are 2
        (((0.0, 1.0, 0.0), (0.0, 1.0, 5.0)), (True, True)),  # of weight 0
        (((0.0, 1.0, 0.0), (1.0, 1.0, 0.0)), (False, False)),
        (((1.0, NAN, 0.0), (1.0, 1.0, 0.0)), (False, True)),  # one has one score alone
    ],
)
def test_a_group_is_flat_if_what_the_scaler_reads_is_equal(rewards: Any, flat: tuple[bool, ...]) -> None:
    weights = (1.0, 2.0, 0.0)
    named = [NamedReward(label, numbered, weight) for label, weight in zip("abc", weights, strict=True)]
    rows = [
        row_of(Rollout(0, sample, (1,), (1,), "stop", 0), dict(zip("abc", each, strict=True)), weights)
        for sample, each in enumerate(rewards)
    ]
    scalers = [Group(GroupConfig(aggregation=name)) for name in ("sum_then_normalize", "normalize_then_sum")]
    results = [collector(0, ALONE, scaler, *named).find_flat(STATE, [0], rows) for scaler in scalers]
    assert results == [[each] for each in flat]


class OfInputs:
    def scale(self, inputs: AdvantageInputs) -> Any: ...


def test_a_scaler_tells_what_it_reads() -> None:
    assert signal_of(Group(GroupConfig())) == "sum"
    assert signal_of(Group(GroupConfig(aggregation="normalize_then_sum"))) == "functions"
    assert signal_of(Opo()) == "sum"
    assert signal_of(OfInputs()) == "all"
    odd = type("Odd", (OfInputs,), {"signal": "function"})
    with pytest.raises(RunFailed, match="has signal = 'function'; it is sum, functions, all"):
        signal_of(odd())


# -- In a run --------------------------------------------------------------------------------------------


def odd_ones_differ(prompts: Any, completions: Any, log_metric: Any, **_: Any) -> list[float]:
    """Score all completions of an even prompt alike, and those of an odd one by their number in the group."""
    log_metric("first", float("0" in prompts))
    pairs = zip(prompts, completions, strict=True)
    return [float(text.split()[1]) if int(prompt) % 2 else 1.0 for prompt, text in pairs]


def numbered(prompts: Any, completions: Any, **_: Any) -> list[float]:
    """Give each completion of an even prompt its number in the group, and those of an odd one the same."""
    pairs = zip(prompts, completions, strict=True)
    return [float(text.split()[1]) if int(prompt) % 2 == 0 else 0.0 for prompt, text in pairs]


def collector(
    rounds: int = 3,
    world: Any = ALONE,
    scaler: Any = None,
    *rewards: NamedReward,
    reward: Any = odd_ones_differ,
) -> Collector:
    engine: Any = SimpleNamespace(steps=0, weights=lambda: iter(()))
    generator: Any = Ahead()
    named = rewards or [NamedReward("odd", reward, on_error="abstain")]
    sampler = CompletionSampler(engine, generator, world, seed=0)
    prompts: Any = Prompts()
    scaler = scaler or Group(GroupConfig())
    return Collector(sampler, Scorer(named), prompts, scaler, SamplingConfig(), 2, rounds=rounds)


def in_order(size: int = 4, prompts: int = 100) -> PromptCursor:
    return PromptCursor(PromptSampler(prompts, size, shuffle=False, seed=0))


def test_a_generation_batch_is_filled_with_groups_that_teach() -> None:
    draws = in_order()
    batch, metrics = collected(collector(), 0, draws.batch(), STATE, draw=draws.more)
    # 0 and 2 are flat: of 4 and 5 the second teaches, then of 6 none, then of 7.
    assert batch.indices == [5, 1, 7, 3]
    assert [row.rollout.prompt_ids for row in batch.rows[::2]] == [(6,), (2,), (8,), (4,)]
    assert (batch.scaled.values != 0).all()
    assert draws.position == 8
    assert metrics["frac_reward_zero_std"] == 0
    assert metrics["dynamic_sampling/rounds"] == 3
    assert metrics["dynamic_sampling/first_reward"] == 1.25
    assert metrics["reward"] == 1.5
    assert sorted({row.rollout.prompt_ids[0] - 1 for row in batch.dropped}) == [0, 2, 4, 6]
    assert batch.logged == {"first": {"odd": 0.5}}  # of 8 of 16 completions


def test_failures_are_counted_in_groups_that_were_dropped_too() -> None:
    def breaks_on_even(prompts: Any, completions: Any, **_: Any) -> list[float]:
        scores = odd_ones_differ(prompts, completions, lambda *told: None)
        return [
            score if int(prompt) % 2 else float("nan") for prompt, score in zip(prompts, scores, strict=True)
        ]

    draws = in_order(2)
    made = collector(reward=breaks_on_even)
    batch, metrics = collected(made, 0, draws.batch(), STATE, draw=draws.more)
    assert batch.indices == [3, 1]
    assert metrics["rewards/odd/errors"] == 4  # of prompts 0 and 2
    assert metrics["rewards/odd/abstained"] == 0


def test_every_rank_replaces_the_same() -> None:
    """In the second round one prompt is drawn, of which the other rank has no part."""

    def step(world: Any) -> Any:
        draws = in_order()
        return collector(world=world).collect(0, draws.batch(), STATE, draw=draws.more)

    one, other = on_two_ranks(step)
    assert list(one.indices) == list(other.indices) == [5, 1, 7, 3]
    assert one.rollouts == other.rollouts
    assert torch.equal(one.rewards, other.rewards)
    assert torch.equal(one.scaled.values, other.scaled.values)


def trainer(steps: int, done: int = 0, position: int = 0) -> tuple[Trainer, list[Any]]:
    """Return a trainer with four of twelve prompts in a batch, and the list of batches that it trains on."""
    made = collector()
    plan = BatchPlan(1, 8, 1, 1, 2)
    schedule = Schedule(plan, PromptSampler(12, plan.prompts_per_generation, True, 0), max_steps=steps)
    draws = PromptCursor(schedule.sampler)
    draws.restore(position)
    made.sampler.engine.steps = done
    run = trainer_of(made, schedule, Policy(made.sampler.engine, []), cursor=draws)
    trained: list[Any] = []
    run.observers.rollouts_scored = lambda _, step, scored: trained.append(
        (step, [(each.rollout, each.reward, each.advantage) for each in scored])
    )
    return run, trained


def test_a_run_resumed_at_its_place_in_the_order_trains_on_the_same() -> None:
    whole, trained = trainer(6)
    positions = []
    whole.checkpoints.after_step = lambda state, *_, **__: positions.append(state.cursor.position)  # type: ignore
    whole.run()
    assert len(trained) == 6
    assert positions[2] > 3 * 4  # prompts were drawn that the schedule does not have
    told = [metrics["epoch"] for metrics in whole.observers.metrics]  # type: ignore[attr-defined]
    assert told == pytest.approx([position / 12 for position in positions])
    resumed, again = trainer(6, done=3, position=positions[2])
    resumed.run()
    assert again == trained[3:]
    names = {"epoch", "dynamic_sampling/prompts", "reward"}
    for mine, theirs in zip(resumed.observers.metrics, whole.observers.metrics[3:], strict=True):  # type: ignore[attr-defined]
        assert {name: mine[name] for name in names} == {name: theirs[name] for name in names}
