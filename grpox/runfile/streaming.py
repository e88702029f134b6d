"""What a stream of rows, which has no known length, asks of the rest of the run file."""

from __future__ import annotations

from grpox.config import RunConfig
from grpox.errors import Problem


def stream_problems(config: RunConfig, streamed: bool = False) -> list[Problem]:
    """Keys that do not go with streamed data.

    Args:
        streamed: the data is a stream whatever `data.streaming` says: an IterableDataset.
    """
    if not (config.data.streaming or streamed):
        return []
    problems = []
    steps = config.train.max_steps
    if steps <= 0:
        what = "streamed data has no known length: say how many steps to take"
        problems.append(Problem(what, "train.max_steps", given=str(steps), allowed="at least 1"))
    if "[" in config.data.split:
        what = "a stream cannot be cut into parts"
        allowed = config.data.split.partition("[")[0] + ", or streaming: false"
        problems.append(Problem(what, "data.split", given=config.data.split, allowed=allowed))
    return problems
