"""A name for a run that was given none."""

from __future__ import annotations

import random


def invented_name() -> str:
    """As MLflow invents them, and another each time.

    MLflow draws from Python's own generator, which runs of the same seed have all brought into the same state.
    """
    from mlflow.utils.name_utils import _generate_random_name

    before = random.getstate()
    random.seed()
    try:
        return str(_generate_random_name())
    finally:
        random.setstate(before)
