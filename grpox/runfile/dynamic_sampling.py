"""What `train.dynamic_sampling_rounds` asks of the run file: a number of steps, and no sampling ahead."""

from __future__ import annotations

from grpox.config import RunConfig
from grpox.errors import Problem

KEY = "train.dynamic_sampling_rounds"


def dynamic_sampling_problems(config: RunConfig) -> list[Problem]:
    """Keys that do not go with generation batches that take as many prompts as they turn out to need."""
    rounds, train = config.train.dynamic_sampling_rounds, config.train
    if rounds is None:
        return []
    problems = []
    if train.max_steps < 0:
        what = f"with {KEY} a generation batch takes as many prompts as it needs: say how many steps to take"
        problems.append(Problem(what, "train.max_steps", given=str(train.max_steps), allowed="at least 0"))
    if train.max_staleness > 0:
        what = "groups to be replaced are known when all are scored, after the updates they were sampled during"
        allowed = "null, or train.max_staleness: 0"
        problems.append(Problem(what, KEY, given=str(rounds), allowed=allowed))
    return problems
