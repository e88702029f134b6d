"""Prompts drawn as they are needed: the schedule's as long as no batch takes more, then the next ones."""

from __future__ import annotations

import math

import pytest
from test_schedule import stream_sampler

from grpox.data.schedule import PromptCursor, PromptSampler


def sampler(prompts: int = 10, shuffle: bool = True) -> PromptSampler:
    """Batches of four prompts."""
    return PromptSampler(prompts, 4, shuffle, seed=3)


@pytest.mark.parametrize("prompts", [4, 8, 10, 11])
def test_without_further_prompts_batches_are_the_schedules(prompts: int) -> None:
    """Both drop the rest of an epoch."""
    draws, schedule = PromptCursor(sampler(prompts)), sampler(prompts)
    assert [draws.batch() for _ in range(9)] == [schedule.prompts_for(generation) for generation in range(9)]


def test_further_prompts_are_the_next_and_later_batches_begin_after_them() -> None:
    draws = PromptCursor(sampler(20, shuffle=False))
    assert draws.batch() == [0, 1, 2, 3]
    assert draws.more(2) == [4, 5]
    assert draws.more(1) == [6]
    assert draws.batch() == [7, 8, 9, 10]


def test_a_batch_begins_in_the_epoch_that_it_ends_in_and_further_prompts_go_on() -> None:
    draws = PromptCursor(sampler(10, shuffle=False))
    draws.batch(), draws.more(3)
    assert (draws.position, draws.epoch) == (7, 0.7)
    assert draws.batch() == [0, 1, 2, 3]  # of the next epoch: three are dropped
    draws.batch()
    assert draws.position == 18
    assert draws.more(4) == [8, 9, 0, 1]
    assert draws.epoch == 2.2


def test_each_epoch_has_its_own_order_whatever_was_drawn_from_the_one_before() -> None:
    plain, order = PromptCursor(sampler(8)), sampler(8)
    plain.batch(), plain.more(1)
    second = order.prompts_for(2) + order.prompts_for(3)
    assert plain.batch() + plain.batch() == second


def test_a_run_goes_on_where_it_was() -> None:
    whole, resumed = PromptCursor(sampler()), PromptCursor(sampler())
    whole.batch(), whole.more(3), whole.batch()
    resumed.restore(whole.position)
    assert resumed.epoch == whole.epoch
    assert [resumed.batch(), resumed.more(2), resumed.batch()] == [whole.batch(), whole.more(2), whole.batch()]


def test_a_stream_keeps_the_whole_batch_and_forgets_the_one_before() -> None:
    rows = stream_sampler([{"prompt": text} for text in "abcdef"], size=2)
    draws = PromptCursor(rows)
    assert draws.epoch == 0
    assert draws.batch() + draws.more(2) + draws.more(1) == [0, 1, 2, 3, 4]
    assert [rows._prompts.text(position) for position in range(5)] == list("abcde")
    assert draws.batch() == [5, 6]
    assert len(rows._stream._rows) == 2
    assert draws.epoch == pytest.approx(7 / 6)


def test_a_stream_goes_on_where_it_was_and_knows_its_epochs() -> None:
    def made() -> PromptCursor:
        return PromptCursor(stream_sampler([{"prompt": text} for text in "abcde"], size=2, shuffle=True))

    whole, resumed = made(), made()
    whole.batch(), whole.more(5)
    resumed.restore(whole.position)
    assert resumed.epoch == whole.epoch == 7 / 5
    assert resumed.batch() == whole.batch() == [7, 8]
    resumed = made()
    resumed.restore(0)
    assert math.isclose(resumed.epoch, 0)
    assert resumed.batch() == [0, 1]
