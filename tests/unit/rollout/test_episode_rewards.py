"""Rewards of episodes: whole conversations, facts that functions ask for by name, and the environment's own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import pytest
from support.logs import LoggedText
from test_sampler import Letters

from grpox.config import DataConfig
from grpox.contracts import (
    Episode,
    FailedScore,
    Rollout,
    ScoredRollout,
    ToolCall,
    ToolResult,
    TrainerState,
    Turn,
    completion_text,
)
from grpox.data.prompts import PromptSet
from grpox.errors import ConfigError, Problem, RunFailed
from grpox.rollout.rewards import NamedReward
from grpox.rollout.rewards.isolation import check_scored_rows
from grpox.rollout.rewards.messages import RewardSpec
from grpox.rollout.rewards.process import RewardProcess
from grpox.rollout.rewards.scoring import RewardNotes, join_inputs, reward_inputs, score_rollouts
from grpox.runfile.paths import _file_problems
from grpox_rewards.configs import CosineConfig, EnvironmentConfig, ExactConfig, LengthConfig, RepetitionConfig
from grpox_rewards.text import Cosine, EnvironmentReward, Length, Repetition

STATE = TrainerState(global_step=4, max_steps=10, epoch=0.0)
CALL = {"type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
MESSAGES = (
    {"role": "user", "content": "begin"},
    {"role": "assistant", "content": "ab", "tool_calls": [CALL]},
    {"role": "tool", "name": "add", "content": "x"},
    {"role": "assistant", "content": "cd"},
    {"role": "user", "content": "right"},
)
RESULT = ToolResult(ToolCall("add", '{"a": 1}'), "x", failure="timeout", seconds=0.5, turn=0)


class Chat(Letters):
    """Letters with a chat template of the messages alone."""

    chat_template = "yes"

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        return "".join(message["content"] for message in messages)


def prompts(conversational: bool = True, has_episodes: bool = False, **columns: Any) -> PromptSet:
    prompt = [{"role": "user", "content": "q"}] if conversational else "q"
    rows = datasets.Dataset.from_dict({"prompt": [prompt], "answer": ["cd"], **columns})
    return PromptSet(rows, "prompt", Chat(), has_episodes=has_episodes)  # type: ignore[arg-type]


def episode(sample: int = 0, **fields: Any) -> Rollout:
    """Two turns, ``ab`` and ``cd``, each with an end token, and the observation ``x`` between them."""
    given = {"rewards": {"right": 1.0, "short": 0.25}, "info": {"success": True}, **fields}
    return Rollout(
        0,
        sample,
        (17,),
        (1, 2, 0, 24, 3, 4, 0),
        "done",
        0,
        model_mask=(True, True, True, False, True, True, True),
        turns=(Turn(0, 3, "stop", 0, reward=1.0), Turn(4, 7, "stop", 0)),
        episode=Episode("calculator", MESSAGES, (RESULT,), **given),
    )


def single(sample: int = 1) -> Rollout:
    return Rollout(0, sample, (17,), (3, 4, 0), "stop", 0)


def scored(
    *functions: Any, rollouts: Sequence[Rollout] = (episode(), single()), data: PromptSet | None = None
) -> tuple[list[ScoredRollout], RewardNotes]:
    named = [NamedReward(f"f{place}", function) for place, function in enumerate(functions)]
    return score_rollouts(named, reward_inputs(data or prompts(), [0], rollouts, named, True), STATE)


def scores(*functions: Any, **options: Any) -> list[tuple[float | None, ...]]:
    """Return the rewards of each row."""
    return [tuple(row.rewards.values()) for row in scored(*functions, **options)[0]]


def test_a_function_sees_the_conversation_after_the_prompt_and_may_change_it() -> None:
    seen: list[Any] = []

    def reward(prompts: Any, completions: Any, **_: Any) -> list[float]:
        seen.extend([prompts[0], list(completions)])
        completions[0][1]["content"] = "changed"
        return [0.0, 0.0]

    rows, _ = scored(reward)
    assert seen[0] == [{"role": "user", "content": "q"}]
    assert seen[1][0][0] == MESSAGES[0]
    assert seen[1][0][1]["tool_calls"] == [CALL]
    assert [each["role"] for each in seen[1][0]] == ["user", "assistant", "tool", "assistant", "user"]
    assert seen[1][1] == [{"role": "assistant", "content": "cd"}]
    assert MESSAGES[1]["content"] == "ab"
    assert [row.completion for row in rows] == ["abxcd", "cd"]  # all tokens, for people
    plain: list[Any] = []
    scored(lambda completions, turns: plain.extend([completions, turns]) or [0.0, 0.0], data=prompts(False))
    assert plain == [["abxcd", "cd"], [["ab", "cd"], ["cd"]]]  # a plain prompt's is the text of all tokens


def test_the_text_of_a_conversation_is_the_models_last_message_and_no_observation() -> None:
    assert completion_text(MESSAGES) == "cd"
    assert completion_text(MESSAGES[:3]) == "ab"  # not the tool's answer
    assert completion_text(MESSAGES[:1]) == ""
    assert completion_text([{"role": "assistant", "content": None, "tool_calls": [CALL]}]) == ""
    assert completion_text([{"role": "assistant", "content": [{"type": "text", "text": "e"}]}]) == "e"
    assert completion_text("abxcd") == "abxcd"


def test_facts_about_episodes_go_to_functions_that_name_them_and_to_no_others() -> None:
    seen: dict[str, Any] = {}

    def asks(turns, tool_calls, model_masks, environment_rewards, environment_info, **columns):  # type: ignore
        seen.update(locals())
        return [0.0, 0.0]

    def anything(**columns: Any) -> list[float]:
        seen["others"] = set(columns)
        return [0.0, 0.0]

    scored(asks, anything, rollouts=(episode(weight=2.0), single()))
    call = {"turn": 0, "name": "add", "arguments": '{"a": 1}', "content": "x"}
    call |= {"failure": "timeout", "seconds": 0.5}
    assert seen["turns"] == [["ab", "cd"], ["cd"]]
    assert seen["tool_calls"] == [[call], []]
    assert seen["model_masks"] == [[True] * 3 + [False] + [True] * 3, [True] * 3]
    assert seen["environment_rewards"] == [{"right": 2.0, "short": 0.5}, None]  # times the weight
    assert seen["environment_info"] == [{"success": True}, {}]
    usual = {"prompts", "completions", "completion_ids", "answer", "trainer_state", "log_metric", "log_extra"}
    assert seen["others"] == usual
    assert set(seen["columns"]) == usual


def test_facts_about_prompts_go_to_functions_that_name_them() -> None:
    seen: dict[str, Any] = {}

    def asks(row_names: Any, prompt_ends: Any, **_: Any) -> list[float]:
        seen.update(row_names=row_names, prompt_ends=prompt_ends)
        return [0.0, 0.0]

    named = [NamedReward("f", asks)]
    long = Rollout(0, 1, (1,) + (2,) * 32, (3, 4, 0), "stop", 0)
    score_rollouts(named, reward_inputs(prompts(), [0], [single(0), long], named), STATE)
    assert seen == {"row_names": ["row 0 (from 0) of the data"] * 2, "prompt_ends": ["q", "b" * 32]}


def test_rows_are_checked_by_the_configs_of_rewards(logged: LoggedText) -> None:
    class Config(ExactConfig):
        def check_rows(self, rows: Any) -> list[Problem | str]:
            values = [(name, row[self.column]) for name, row in rows]
            return [f"{name} is odd" if value == "odd" else Problem(name, "column") for name, value in values]

    def check(column: str, key: str = "rewards") -> list[tuple[str, str]]:
        data = prompts(about=[{"right": {"text": "odd"}, "style": None}])
        bound = {f"{key}[0]": SimpleNamespace(key=f"{key}[0]", label="f", config=Config(column=column))}
        run: Any = SimpleNamespace(components=bound)
        try:
            check_scored_rows(run, "rewards", data)
        except ConfigError as error:
            return [(problem.key, problem.nearest) for problem in error.problems]
        return []

    assert check("about.right.text") == []
    assert "reward 'f': row 0 (from 0) of the data is odd" in logged()
    assert check("answer") == [("rewards[0].column", "")]
    assert check("about.rihgt")[0] == ("rewards[0]", "about.right")
    assert check("about.style")[0] == ("rewards[0]", "about.style")
    assert check("answer", "evaluation.rewards") == []


def test_a_process_gets_the_facts_that_its_function_names(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "def asks(completions, turns, environment_rewards, **columns):\n"
        "    assert 'tool_calls' not in columns, columns\n"
        "    pairs = zip(turns, environment_rewards)\n"
        "    return [len(of_each) + sum((parts or {}).values()) for of_each, parts in pairs]\n"
    )
    plan = RewardSpec("asks", "rewards[0]", f"{tmp_path / 'own.py'}:asks", True, b"N.", (), None)
    function = RewardProcess(plan, 60.0, 4.0)
    try:
        assert scores(function) == [(3.25,), (1.0,)]
    finally:
        function.close()


def test_a_column_of_the_name_takes_the_place_of_a_fact() -> None:
    def reward(turns: Any, **columns: Any) -> list[float]:
        return [float(value) for value in turns]

    def others(**columns: Any) -> list[float]:
        return [float(value) for value in columns["turns"]]

    found = scores(reward, others, rollouts=(single(0), single(1)), data=prompts(turns=[7]))
    assert found == [(7.0, 7.0), (7.0, 7.0)]


def test_a_run_with_episodes_refuses_such_a_column_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reserves for arguments of reward functions") as raised:
        prompts(has_episodes=True, tool_calls=[1])
    assert raised.value.problems[0].given == "tool_calls"
    (tmp_path / "data.jsonl").write_text('{"prompt": "q", "tool_calls": 1}\n')
    for has_episodes in (False, True):
        run: Any = SimpleNamespace(
            has_episodes=has_episodes, environments={}, data=DataConfig(path="data.jsonl")
        )
        context: Any = SimpleNamespace(config=run, columns={})
        problems, _ = _file_problems("data.path", str(tmp_path / "data.jsonl"), context)
        assert [problem.given for problem in problems] == ["tool_calls"] * has_episodes


def test_groups_that_are_scored_together_keep_their_own_facts() -> None:
    def reward(turns: Any, **_: Any) -> list[float]:
        return [float(len(of_each)) for of_each in turns]

    data, named = prompts(), [NamedReward("f", reward)]
    groups = [reward_inputs(data, [0, 0], [each], named) for each in (single(0), episode(0))]
    rows, _ = score_rollouts(named, join_inputs(groups), STATE)
    assert [row.rewards for row in rows] == [{"f": 1.0}, {"f": 2.0}]
    assert [row.completion for row in rows] == ["cd", "abxcd"]


def environment(part: str | None = None) -> EnvironmentReward:
    return EnvironmentReward(EnvironmentConfig(part=part))


def test_the_environments_reward_is_its_number_the_sum_of_its_parts_or_one_of_them() -> None:
    rollouts = (
        episode(0),
        episode(1, rewards={"": 0.5}, weight=-2.0),
        episode(2, rewards=None),
        episode(3, weight=0.5),
        single(4),
    )
    assert scores(environment(), rollouts=rollouts) == [(1.25,), (-1.0,), (None,), (0.625,), (None,)]
    assert scores(environment("short"), rollouts=(rollouts[0], rollouts[3])) == [(0.25,), (0.125,)]


@pytest.mark.parametrize(
    ("rewards", "known"),
    [({"": 1.0}, "a single number, which has no parts"), ({"a": 1.0, "b": 2.0}, "'a', 'b'"), ({}, "none")],
)
def test_a_part_that_the_environment_does_not_give_is_a_failure_by_name(rewards: Any, known: str) -> None:
    score = environment("right")(environment_rewards=[rewards])[0]
    assert isinstance(score, FailedScore)
    assert score.reason == f"the environment's reward has no part 'right'; it has {known}"
    with pytest.raises(RunFailed, match="no part 'right'"):
        scored(environment("right"), rollouts=(episode(rewards=rewards),))


def test_a_failed_and_a_lost_episode_are_reported_once_each_and_abstain() -> None:
    rollouts = [
        episode(0, rewards=None, failure="ValueError: no (lake.py:3)"),
        episode(1, rewards=None, failure="ValueError: never (lake.py:4)"),
        episode(2, rewards=None, lost="killed by signal 9"),
    ]
    rows, notes = scored(environment(), rollouts=rollouts)
    assert [row.rewards["f0"] for row in rows] == [None] * 3
    texts = [text.splitlines()[0] for text in notes.warnings.values()]
    assert texts == [
        "an episode of environment 'calculator' failed: ValueError: no (lake.py:3)",
        "an episode of environment 'calculator' was lost: killed by signal 9",
    ]


def test_lengths_in_tokens_are_those_of_the_models_own_tokens() -> None:
    length = Length(LengthConfig(target=3, unit="tokens", scale="absolute"))
    repetition = Repetition(RepetitionConfig(size=1, unit="tokens"))
    cosine = Cosine(CosineConfig(correct_by="exact", column="answer", max_length=6))
    first, second = scores(length, repetition, cosine)
    # Six tokens of the model: a b 0 c d 0, in which one of six repeats; and three: c d 0.
    assert first == (-3.0, 5 / 6 - 1, 0.5)
    assert second == (0.0, 0.0, pytest.approx(0.75))


def test_lists_rate_the_models_turns_and_in_conversations_parts_of_the_last_one() -> None:
    def per_turn(completions: Any, **_: Any) -> list[list[float]]:
        return [[1.0, 2.0], [3.0]]

    per_turn.per = "turn"  # type: ignore[attr-defined]

    def per_part(completions: Any, turns: Any, **_: Any) -> list[list[float]]:
        return [[5.0, 7.0] for _ in turns]

    per_part.per, per_part.separator = "separator", "c"  # type: ignore[attr-defined]
    rows, _ = scored(per_turn, per_part)
    # "cd" is an empty part that ends with the turn's first token at the earliest, and "d" up to its end.
    assert [row.token_rewards for row in rows] == [
        {"f0": [0, 0, 1.0, 0, 0, 0, 2.0], "f1": [0, 0, 0, 0, 5.0, 0, 7.0]},
        {"f0": [0, 0, 3.0], "f1": [5.0, 0, 7.0]},
    ]
    plain, _ = scored(per_part, rollouts=(episode(),), data=prompts(conversational=False))
    assert plain[0].token_rewards == {"f0": [0, 0, 0, 5.0, 0, 0, 7.0]}
