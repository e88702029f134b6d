"""A run that was given no name has one of its own, whatever the seed."""

from __future__ import annotations

import random


def test_runs_of_one_seed_have_different_names() -> None:
    from grpox_mlflow.run_name import invented_name

    names = set()
    for _ in range(5):
        random.seed(0)
        names.add(invented_name())
    assert len(names) > 1


def test_it_draws_nothing_of_the_run() -> None:
    from grpox_mlflow.run_name import invented_name

    random.seed(0)
    expected = random.random()
    random.seed(0)
    invented_name()
    assert random.random() == expected
