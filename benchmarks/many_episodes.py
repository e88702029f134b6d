"""Episodes whose tools raise, hang, die and print megabytes: is any lost, counted twice, or something left?

    python benchmarks/many_episodes.py --episodes 1000 --out benchmarks/results/many_episodes.json

Every environment appends a letter to a file as it is reset and as it is closed. Beside that, the processor
time of an episode whose tools do nothing, with its own process and without.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
from outcome import add_out, tell
from surroundings import surroundings

from grpox.config import EpisodesConfig
from grpox.contracts import ToolCall
from grpox.plugins.load_object import load_object
from grpox.rollout.episodes.local import LocalEnvironments
from grpox.rollout.episodes.messages import Action, Environments, EnvironmentSpec, Lost, Start
from grpox.rollout.episodes.pool import ProcessEnvironments

ENVIRONMENTS = Path(__file__).parents[1] / "tests" / "unit" / "rollout" / "episodes" / "faulty_environments.py"
KINDS = ("nothing", "raises", "prints", "exits", "is_killed", "nothing", "eats", "forks", "nothing", "leaves")
RARE = {3: "hangs", 41: "hangs_in_c", 82: "hangs_in_spite"}
"""Faults that take time: one of each in a hundred episodes of the first thousand."""
QUIET_EPISODES = 256
"""Episodes whose tools do nothing, for the cost of an episode."""
LOSING = {"exits", "is_killed", "leaves", "hangs_in_c", "hangs_in_spite"}


MARK = "GRPOX_MANY_EPISODES"
"""Environment variable that all processes of the episodes inherit, by which the last ones are found."""
LAST_SECONDS = 5.0
"""Seconds that a killed process may take to be gone."""


def marked(mark: str) -> Iterator[psutil.Process]:
    """Yield the processes that have a mark, whoever their parent has become."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                yield process


def kind_of(key: int) -> str:
    """Return the fault of an episode."""
    return RARE.get(key % 100, KINDS[key % len(KINDS)])


def many_episodes(count: int, file: Path, folder: Path, limit: float = 1.0) -> dict[str, Any]:
    """Run episodes of one turn each, all open at once, and return what was counted.

    Args:
        count: number of episodes.
        file: the environments.
        folder: for the file of letters.
        limit: seconds of a call.
    """
    plan = blueprint(file, folder)
    limits = EpisodesConfig(tool_timeout=limit, memory=1.0, concurrency=16)
    mark = str(folder)
    os.environ[MARK] = mark
    try:
        environments = ProcessEnvironments([plan], [], limits, grace=1.0)
    finally:
        del os.environ[MARK]
    begun = time.perf_counter()
    try:
        started = environments.start({key: Start(0, {"number": key}, key) for key in range(count)})
        opened = time.perf_counter()
        calls = {key: [ToolCall("fault", f'{{"kind": "{kind_of(key)}"}}')] for key in range(count)}
        answers = environments.step({key: Action("", each) for key, each in calls.items()})
        stepped = time.perf_counter()
        lost = {key for key, answer in answers.items() if isinstance(answer, Lost)}
        outcomes = environments.finish([key for key in answers if key not in lost])
    finally:
        environments.close()
    ended = time.perf_counter()
    _, left = psutil.wait_procs(list(marked(mark)), timeout=LAST_SECONDS)
    expected = {key for key in range(count) if kind_of(key) in LOSING}
    letters = Counter((folder / "letters").read_text().split())
    wanted = Counter([f"o{key}" for key in range(count)] + [f"c{key}" for key in set(range(count)) - expected])
    right = [key for key, outcome in outcomes.items() if outcome.info == {"number": key}]
    return {
        "episodes": count,
        "answered": sum(answer.content == f"start {key}" for key, answer in started.items()),
        "finished": len(right),
        "wrongly_lost": sorted(lost - expected),
        "wrongly_open": sorted(expected - lost),
        "wrong_letters": sorted((letters - wanted) + (wanted - letters)),
        "counters": asdict(environments.counters),
        "processes_left": len(left),
        "seconds": {
            "start": round(opened - begun, 2),
            "step": round(stepped - opened, 2),
            "finish": round(ended - stepped, 2),
        },
    }


def blueprint(file: Path, folder: Path) -> EnvironmentSpec:
    """Return the environment, with the file of its letters."""
    config = load_object(f"{file}:Noted").Config(file=str(folder / "letters"))
    return EnvironmentSpec("Noted", "environment", f"{file}:Noted", pickle.dumps(config))


def milliseconds(environments: Environments, count: int) -> dict[str, float]:
    """Return the processor time for each of `count` episodes whose tools do nothing, of all processes."""
    call = ToolCall("fault", '{"kind": "nothing"}')
    work = {
        "start": lambda: environments.start({key: Start(0, {"number": key}, key) for key in range(count)}),
        "turn": lambda: environments.step({key: Action("", [call]) for key in range(count)}),
        "finish": lambda: environments.finish(list(range(count))),
    }
    result, before = {}, processor_seconds()
    for name, do in work.items():
        do()
        after = processor_seconds()
        result[name] = round(1000 * (after - before) / count, 2)
        before = after
    return result


def processor_seconds() -> float:
    """Return the processor time of this process, and of those below it with those that they have waited for."""
    seconds = time.process_time()
    for each in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # has ended, so that the one above it tells its time
            seconds += sum(each.cpu_times()[:4])
    return seconds


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=1000)
    add_out(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = many_episodes(arguments.episodes, ENVIRONMENTS, Path(folder))
        plan = blueprint(ENVIRONMENTS, Path(folder))
        apart = ProcessEnvironments([plan], [], EpisodesConfig())
        result["processor_milliseconds"] = {
            "process": milliseconds(apart, QUIET_EPISODES),
            "none": milliseconds(LocalEnvironments([plan], [], EpisodesConfig()), QUIET_EPISODES),
        }
        apart.close()
    result["command"] = f"python benchmarks/many_episodes.py --episodes {arguments.episodes}"
    result["load"] = round(os.getloadavg()[0], 1)
    tell({**result, **surroundings(["grpox", "pydantic"])}, arguments.out)


if __name__ == "__main__":
    main()
