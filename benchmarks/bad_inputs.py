"""Gives every bad input of tests/fuzz to the command itself, one after the other, and times the answer.

Each has to end in a clear error: within 3 seconds where the run file or command line alone shows it, within 15
where the tokenizer, the model or the data have to be opened.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surroundings import surroundings

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "fuzz")]
from fuzz_case import Case, complaints, make_shared  # noqa: E402
from fuzz_corpus import all_cases  # noqa: E402
from support.handlers import Ended  # noqa: E402

RUN_FILE_SECONDS, OPENED_SECONDS = 3.0, 15.0
GIVEN_UP_AFTER = 120.0
RESULT = Path(__file__).parent / "results" / "bad_inputs.json"


@dataclass(frozen=True)
class Answer:
    """The outcome of one case."""

    case: Case
    seconds: float
    cpu_seconds: float
    """Seconds of CPU time, which a machine without other work would need."""
    complaints: list[str]

    @property
    def in_time(self) -> bool:
        return self.seconds <= (OPENED_SECONDS if self.case.opened else RUN_FILE_SECONDS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="cases whose name holds this text")
    parser.add_argument("--every", type=int, default=1, help="take one case of so many; default: all")
    parser.add_argument("--output", type=Path, help="default: results/, where all cases are run")
    given = parser.parse_args()
    cases = [case for case in all_cases() if given.only in case.name][:: given.every]
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        make_shared(root / "shared")
        answers = [_answer(case, root / f"case{number}") for number, case in enumerate(cases)]
    told = json.dumps({**_figures(answers), "command": shlex.join(["python", *sys.argv])}, indent=2)
    whole = not given.only and given.every == 1
    if path := given.output or (RESULT if whole else None):
        path.write_text(told + "\n", encoding="utf-8")
    print(told)
    sys.exit(any(answer.complaints or not answer.in_time for answer in answers))


def _answer(case: Case, folder: Path) -> Answer:
    folder.mkdir()
    case.make(folder)
    began, cpu = time.monotonic(), _cpu_seconds()
    try:
        done = subprocess.run(
            [str(Path(sys.executable).with_name("grpox")), *map(os.fsencode, case.arguments)],
            cwd=folder,
            env=os.environ | {"HF_DATASETS_CACHE": str(folder.parent / "datasets")},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=GIVEN_UP_AFTER,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(case, GIVEN_UP_AFTER, _cpu_seconds() - cpu, ["no answer"])
    seconds = time.monotonic() - began
    outcome = Ended(done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace"))
    found = complaints(case, outcome)
    if found or seconds > (OPENED_SECONDS if case.opened else RUN_FILE_SECONDS):
        print(f"{case.name}: {seconds:.1f} s {found}", file=sys.stderr, flush=True)
    return Answer(case, seconds, _cpu_seconds() - cpu, found)


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _figures(answers: Sequence[Answer]) -> dict[str, Any]:
    return {
        "cases": len(answers),
        "clear_errors": sum(not answer.complaints for answer in answers),
        "failures": {answer.case.name: answer.complaints for answer in answers if answer.complaints},
        "run_file_alone": _times([a for a in answers if not a.case.opened], RUN_FILE_SECONDS),
        "opened": _times([a for a in answers if a.case.opened], OPENED_SECONDS),
        "load_average": [round(load, 1) for load in os.getloadavg()],
        **surroundings(["grpox", "torch", "transformers", "datasets", "pyyaml", "pydantic"]),
    }


def _times(answers: Sequence[Answer], bound: float) -> dict[str, Any]:
    if not answers:
        return {"cases": 0}
    seconds = sorted(answer.seconds for answer in answers)
    slowest = sorted(answers, key=lambda answer: answer.seconds, reverse=True)
    return {
        "cases": len(answers),
        "bound_seconds": bound,
        "within_bound": sum(answer.in_time for answer in answers),
        "median_seconds": round(statistics.median(seconds), 2),
        "p95_seconds": round(seconds[int(0.95 * (len(seconds) - 1))], 2),
        "median_cpu_seconds": round(statistics.median(answer.cpu_seconds for answer in answers), 2),
        "most_cpu_seconds": round(max(answer.cpu_seconds for answer in answers), 2),
        "slowest": {answer.case.name: round(answer.seconds, 2) for answer in slowest[:5]},
    }


if __name__ == "__main__":
    main()
