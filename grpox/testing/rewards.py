"""Contract of every reward function, called as a run calls it: by keyword, in a thread."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar
from unittest import SkipTest

from grpox.contracts import Rollout, TrainerState, completion_text
from grpox.data.reward_signature import Signature, missing_columns
from grpox.rollout.rewards.lists import ListShape, lengths_of
from grpox.rollout.rewards.named import RewardCall
from grpox.rollout.rewards.scoring import episode_arguments
from grpox.testing.conformance import Conformance, Violation, require
from grpox.testing.formula import parameters_of

TIMEOUT = 30.0
"""Seconds that a call may take; a run's own default is longer."""
UNKNOWN_COLUMN = "42"
"""In every row of a column that the function asks for and the suite does not name."""
OTHER_COLUMN = "7"
"""In every third row, where rows must differ."""
ODD = ("", " ", "42", "The answer is 42.", "\\boxed{42}", "x" * 5000, "\u4e2d\u6587 \U0001f600 \u0000")
"""Completions that a policy writes sooner or later."""


class RewardConformance(Conformance):
    """The checks of a reward function."""

    kind = "reward"
    completions: ClassVar[Sequence[str]] = ODD
    columns: ClassVar[Mapping[str, Any]] = {}
    reference: ClassVar[Callable[..., float | None] | None] = None
    """The formula for one completion; it takes by name what it needs of `completion`, `completion_ids` and the
    columns."""
    ranked: ClassVar[Sequence[str]] = ()
    """Completions from the best to the worst."""

    def test_runs(self) -> None:
        """Returns one finite number, a list as its `per` says, or None to abstain, for each completion."""
        scores = self._scores(self.build(), self.completions)
        listed = ", ".join("None" if score is None else f"{score:g}" for score in sorted(set(scores), key=repr))
        self.notes.append(f"scores of {len(scores)} completions: {listed}")
        if all(score is None for score in scores):
            self.notes.append("it abstained from all: name what it scores by in the suite's `columns`")

    def test_odd_completions(self) -> None:
        """Takes whatever a policy writes: nothing, one token for ever, other scripts."""
        function = self.build()
        for completion in ODD:
            self._scores(function, [completion])

    def test_pure(self) -> None:
        """Leaves its arguments as they are."""
        function = self.build()
        arguments = self._arguments(function, self.completions)
        copies = copy.deepcopy(arguments)
        _called(function, arguments)
        for name, value in copies.items():
            advice = "a run passes copies, but other callers do not: copy before you change them"
            require(arguments[name] == value, f"it changes {name}", _shown(self.completions), advice)

    def test_the_same_twice(self) -> None:
        """Reports if a completion gets another score a second time, or by itself."""
        function = self.build()
        first, second = (self._scores(function, self.completions) for _ in range(2))
        alone = [self._scores(function, [completion])[0] for completion in self.completions]
        note = "a score depends on the other completions of the call: which these are depends on timing"
        if first != second:
            note = "scores the same completions otherwise a second time: runs will not repeat exactly"
        if not first == second == alone:
            self.notes.append(note)

    def test_direction(self) -> None:
        """Scores the completions of `ranked` from the highest to the lowest, the first above the last."""
        if not self.ranked:
            self.notes.append("name completions from the best to the worst in the suite's `ranked`")
            return
        scores = self._scores(self.build(), self.ranked)
        numbers = [score for score in scores if score is not None]
        example = f"{_shown(self.ranked)}\nscores {scores}"
        require(len(numbers) == len(scores), "it abstains from a completion of `ranked`", example)
        falls = numbers == sorted(numbers, reverse=True) and (len(numbers) < 2 or numbers[0] > numbers[-1])
        require(falls, "a worse completion gets a better score, or all get the same", example)

    def test_alignment(self) -> None:
        """Each score belongs to the completion at its place: in another order, the scores are in that order."""
        function = self.build()
        if getattr(function, "uses_order", False):
            raise SkipTest("it declares uses_order = True")
        scores, again = (self._rows_scores(function, range(len(self.completions))) for _ in range(2))
        if scores != again:
            raise SkipTest("it scores the same completions otherwise a second time")
        count = len(scores)
        for order in (list(reversed(range(count))), [*range(1, count), 0]):
            turned = self._rows_scores(function, order)
            expected = [scores[place] for place in order]
            example = _shown([self.completions[place] for place in order])
            example += f"\nscores {turned}\nnot    {expected}"
            what = "in another order, completions get the scores of others"
            advice = "return scores in the order of completions; where order counts, declare uses_order = True"
            require(turned == expected, what, example, advice)
        alone = [self._rows_scores(function, [place])[0] for place in range(count)]
        is_shifted = alone != scores and sorted(alone, key=repr) == sorted(scores, key=repr)
        example = f"{_shown(self.completions)}\nscores {scores}\nalone  {alone}"
        require(not is_shifted, "among others, a completion gets the score of another", example)

    def test_equal_completions(self) -> None:
        """Completions that are equal get a score each."""
        function = self.build()
        for completion in self.completions[:2]:
            self._scores(function, [completion] * 3)

    def test_same_as_reference(self) -> None:
        """Gives each completion the score of the reference."""
        reference, function = self._formula, self.build()
        arguments = self._arguments(function, self.completions)
        known = [name for name, values in arguments.items() if isinstance(values, list)]
        names = parameters_of(reference, ["completion", *known])
        for place, score in enumerate(_called(function, arguments)):
            row = {name: arguments[name][place] for name in known}
            row["completion"] = row["completions"]
            wanted = reference(**{name: row[name] for name in names})
            what = f"completion {place} scores {score}, and by the reference {wanted}"
            same = score is not None and wanted is not None and math.isclose(score, wanted, rel_tol=1e-6)
            require(same or score is wanted is None, what, _shown([self.completions[place]]))

    def test_two_at_once(self) -> None:
        """Two calls at the same time, in two threads, give what one gives."""
        function = self.build()
        expected = self._scores(function, self.completions)
        if self._scores(function, self.completions) != expected:
            raise SkipTest("it scores the same completions otherwise a second time")
        count, reversed_ = len(self.completions), list(reversed(self.completions))
        # Other completions, so that what one call leaves on the object shows in the other.
        pairs = [(self.completions, expected), (reversed_, self._scores(function, reversed_))]
        calls = []
        for completions, scores in pairs:
            arguments = self._arguments(function, completions)
            lengths = _lengths(function, arguments)
            calls.append((RewardCall(function, arguments, count, lengths), scores))
        for call, _ in calls:
            call.start()
        for call, scores in calls:
            call.wait(TIMEOUT)
            same = call.scores is not None and call.scores.values == scores
            advice = "keep what belongs to a call in local variables, not on the object or the module"
            failure = f" ({call.failure})" if call.failure else ""
            require(same, f"two calls at once give other scores{failure}", _shown(self.completions), advice)

    def test_conversations(self) -> None:
        """Reports if it takes conversations, lists of messages."""
        function = self.build()
        messages = [[{"role": "assistant", "content": completion}] for completion in self.completions]
        call = _run(function, self._arguments(function, messages))
        refused = f"does not take conversations: {call.failure}"
        self.notes.append(refused if call.scores is None else "takes conversations")

    def test_time(self) -> None:
        """Reports how long it takes."""
        function = self.build()
        self._scores(function, self.completions)
        call = _run(function, self._arguments(function, self.completions))
        self.notes.append(f"{1000 * call.seconds / len(self.completions):.2g} ms a completion")

    def _arguments(self, function: Callable[..., Any], completions: Sequence[Any]) -> dict[str, Any]:
        columns = dict(self.columns)
        columns |= dict.fromkeys(missing_columns(function, columns), UNKNOWN_COLUMN)
        count = len(completions)
        conversational = bool(completions) and not isinstance(completions[0], str)
        prompt = [{"role": "user", "content": "What is 6 x 7?"}] if conversational else "What is 6 x 7?"
        ids = [tuple(1 + n % 7 for n in range(1 + min(len(str(text)), 63))) for text in completions]
        rollouts = [Rollout(0, place, (1,), each, "stop", 0) for place, each in enumerate(ids)]
        facts = episode_arguments(rollouts, [[completion_text(completion)] for completion in completions])
        facts |= {"row_names": [f"row {place}" for place in range(count)], "prompt_ends": ["7?"] * count}
        return {
            "prompts": [copy.deepcopy(prompt) for _ in range(count)],
            "completions": list(completions),
            "completion_ids": [list(each) for each in ids],
            "trainer_state": TrainerState(global_step=3, max_steps=10, epoch=0.5),
            **{name: facts[name] for name in Signature.of(function).facts},
            **{name: [copy.deepcopy(value) for _ in range(count)] for name, value in columns.items()},
        }

    def _rows_scores(self, function: Callable[..., Any], places: Sequence[int]) -> list[float | None]:
        """Score the completions at `places`; unknown columns and numbers differ in every third row."""
        arguments = self._arguments(function, [self.completions[place] for place in places])
        numbers = [name for name, value in self.columns.items() if isinstance(value, str) and value.isdigit()]
        for name in (*missing_columns(function, self.columns), *numbers):
            arguments[name] = [OTHER_COLUMN if place % 3 == 1 else UNKNOWN_COLUMN for place in places]
        return _called(function, arguments)

    def _scores(self, function: Callable[..., Any], completions: Sequence[str]) -> list[float | None]:
        return _called(function, self._arguments(function, completions))


def _run(function: Callable[..., Any], arguments: Mapping[str, Any]) -> RewardCall:
    count = len(arguments["completions"])
    lengths = _lengths(function, arguments)
    call = RewardCall(function, arguments, count, lengths)
    call.start()
    call.wait(TIMEOUT)
    if call.needs_main_thread():  # a run then calls it there
        call = RewardCall(function, arguments, count, lengths)
        call.run()
    return call


def _lengths(function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[int] | None:
    try:
        shape = ListShape.of(function)
        return None if shape is None else lengths_of(shape, arguments)
    except ValueError as error:
        raise Violation(f"it {error}") from error


def _called(function: Callable[..., Any], arguments: Mapping[str, Any]) -> list[float | None]:
    call, completions = _run(function, arguments), arguments["completions"]
    if call.scores is None:
        advice = "one number for each completion, or None to abstain"
        raise Violation(f"it {call.failure}", _shown(completions), advice)
    for place, why in call.scores.refused.items():
        raise Violation(f"it {why}", _shown([completions[place]]))
    return call.scores.values


def _shown(completions: Sequence[Any]) -> str:
    return "\n".join(f"completion {place}: {str(text)[:60]!r}" for place, text in enumerate(completions))
