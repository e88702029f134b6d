"""`grpox watch` on a large run: seconds until its page is painted and of searches, and the server's memory.

Writes the folder of a run that never was, with words drawn at random, and starts the command on it. A headless
Chromium opens the address; without one, the time is that of the first complete answers. Searches are requests
to the server, repeated until all files are read; the slowest counts. The memory is the highest of the server's
process.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import numpy as np
import psutil
import pyarrow
from outcome import add_out, tell
from pyarrow import parquet
from surroundings import surroundings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.chromium import Browser, executable

GRPOX = str(Path(sys.executable).with_name("grpox"))
METRICS, GROUP, PROMPTS, WORDS = 60, 10, 20_000, 60
"""Metrics of a step; completions of a prompt; different prompts; words of a completion."""
RARE = "zqxjk"
COMMON = "therefore"
PAINTED = "!!document.querySelector('canvas') && document.body.innerText.includes('reward')"


def make_run(folder: Path, steps: int, completions: int) -> int:
    """Write the folder of a run, and return the bytes of its completions as text."""
    random = np.random.default_rng(0)
    letters = np.array(list("aeionrstlu"))
    words = np.array(
        ["".join(random.choice(letters, random.integers(2, 9))) for _ in range(5000)], dtype=object
    )
    words[:50] = COMMON  # one word in a hundred
    (folder / "completions").mkdir(parents=True)
    batch, size = completions // steps, 0
    for step in range(1, steps + 1):
        texts = [" ".join(row) for row in words[random.integers(0, len(words), (batch, WORDS))]]
        if step % max(1, steps // 20) == 0:
            texts[-1] += f" a{RARE}b"
        size += sum(map(len, texts))
        numbers = random.integers(0, PROMPTS, -(-batch // GROUP)).repeat(GROUP)[:batch]
        columns = {
            "step": np.full(batch, step),
            "group": np.arange(batch) // GROUP,
            "sample": np.arange(batch) % GROUP,
            "prompt": [f"Question {number}: what is {number} + {number % 97}?" for number in numbers],
            "completion": texts,
            "reward": np.round(random.random(batch), 3),
            "advantage": random.normal(size=batch),
            "rewards/exact": random.random(batch),
            "finish_reason": ["stop"] * batch,
            "policy_version": np.full(batch, step - 1),
            "completion_length": np.full(batch, WORDS),
            "data/answer": [str(number + number % 97) for number in numbers],
        }
        path = folder / "completions" / f"step_{step:06d}.parquet"
        repeated = ["prompt", "finish_reason", "data/answer"]
        parquet.write_table(pyarrow.table(columns), path, use_dictionary=repeated)
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            values = dict(
                zip(
                    map("of_group/metric_{}".format, range(METRICS - 5)),
                    random.normal(size=METRICS - 5).tolist(),
                    strict=True,
                )
            )
            phases = {"time/generate": 2.0, "time/rewards": 0.5, "time/update": 1.0, "step_time": 3.5}
            line = {
                "step": step,
                "time": 1e9 + 3.5 * step,
                "metrics": {"reward": step / steps, **phases, **values},
            }
            file.write(json.dumps(line) + "\n")
    versions = {"versions": {"grpox": "0"}, "git_commit": None, "source": "large.yaml", "total_steps": steps}
    (folder / "versions.json").write_text(json.dumps(versions))
    (folder / "config.yaml").write_text("model: {path: none}\nrewards: [{name: exact, weight: 1}]\n")
    return size


class Server:
    """The command on a run's folder, from its start on; its highest memory is followed."""

    def __init__(self, folder: Path) -> None:
        started = time.perf_counter()
        self._process = subprocess.Popen(
            [GRPOX, "watch", str(folder), "--no-browser"], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.address = self._process.stdout.readline().strip()
        self.first_line_s = time.perf_counter() - started
        self._base, _, self._token = self.address.partition("/?token=")
        self.peak = 0
        self._is_over = threading.Event()
        self._sampler = threading.Thread(target=self._follow_memory)
        self._sampler.start()

    def ask(self, name: str, **parameters: Any) -> Any:
        """Return an answer of the server."""
        request = urllib.request.Request(f"{self._base}/api/{name}?{urlencode(parameters)}")
        request.add_header("Authorization", f"Bearer {self._token}")
        with urllib.request.urlopen(request, timeout=600) as answer:
            return json.load(answer)

    def stop(self) -> None:
        self._is_over.set()
        self._sampler.join()
        self._process.terminate()
        self._process.wait()

    def _follow_memory(self) -> None:
        own = psutil.Process(self._process.pid)
        while not self._is_over.wait(0.05):
            processes = [own, *own.children(recursive=True)]
            self.peak = max(self.peak, sum(process.memory_info().rss for process in processes))


@contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    try:
        yield server
    finally:
        server.stop()


def first_paint(server: Server, browser: Browser | None) -> float:
    """Return the seconds from the opening of the address to curves, or to the answers that they need."""
    started = time.perf_counter()
    if browser is None:
        server.ask("runs")
        server.ask("run")
        server.ask("metrics")
        server.ask("completions", limit=20)
        return time.perf_counter() - started
    browser.open(server.address)
    while not browser.value(PAINTED):
        assert time.perf_counter() - started < 300, browser.text
        time.sleep(0.01)
    return time.perf_counter() - started


def searches(server: Server, steps: int) -> dict[str, dict[str, Any]]:
    """Return for each search the seconds until its first answer and until its last one, and what it found."""
    while not (rows := server.ask("completions", limit=1)["rows"]):
        time.sleep(0.2)
    queries: Mapping[str, Mapping[str, Any]] = {
        "everything": {},
        "a common word": {"text": COMMON},
        "a rare part of a word": {"text": RARE},
        "a text that is nowhere": {"text": "xqzzy qx"},
        "one letter": {"text": "e"},
        "rewards and steps": {
            "reward_min": 0.9, "reward_max": 0.95, "step_min": steps // 2, "step_max": 3 * steps // 4
        },
        "the best with a word": {"text": COMMON, "order": "reward", "reward_min": 0.5},
        "by prompt": {"group_by_prompt": "true"},
        "a word by prompt": {"group_by_prompt": "true", "text": "aeion"},
        "one prompt over the steps": {"prompt": rows[0]["prompt_id"]},
    }  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for name, query in queries.items():
        started = time.perf_counter()
        answer = server.ask("completions", **query)
        first = time.perf_counter() - started
        while not answer["is_indexed"]:
            time.sleep(0.2)
            answer = server.ask("completions", **query)
        seconds = (first, time.perf_counter() - started)
        found[name] = {"seconds": [round(each, 3) for each in seconds], "total": answer["total"]}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000, metavar="N", help="default: 10000")
    parser.add_argument("--completions", type=int, default=1_000_000, metavar="N", help="default: 1000000")
    add_out(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        size = make_run(root / "run", arguments.steps, arguments.completions)
        (root / "profile").mkdir()
        if executable() is None:
            result = measure(root, arguments.steps, None)
        else:
            with Browser(root / "profile") as browser:
                result = measure(root, arguments.steps, browser)
    result = {
        "steps": arguments.steps,
        "completions": arguments.completions,
        "metrics": METRICS,
        "completions_mb": round(size / 1e6),
        **result,
    }
    for key in ("first_line_s", "first_paint_s", "first_hits_s", "search_s", "peak_mib"):
        print(f"{key:20} {result[key]}")
    for what, search in result["searches"].items():
        print(f"{what:26} {search['total']:>9} {search['seconds'][0]:7.3f} s {search['seconds'][1]:7.3f} s")
    tell(result | surroundings(["grpox", "starlette", "uvicorn", "pyarrow", "numpy"]), arguments.out)


def measure(root: Path, steps: int, browser: Browser | None) -> dict[str, Any]:
    """Serve the run, open its page, and search."""
    with serving(root / "run") as server:
        painted = first_paint(server, browser)
        found = searches(server, steps)
        peak, first_line = server.peak, server.first_line_s
    first, whole = (max(search["seconds"][place] for search in found.values()) for place in (0, 1))
    return {
        "first_line_s": round(first_line, 2),
        "first_paint_s": round(painted, 2),
        "first_paint_is_of": "the first answers" if browser is None else "the curves in Chromium",
        "first_hits_s": first,
        "search_s": whole,
        "peak_mib": round(peak / 2**20),
        "searches": found,
    }


if __name__ == "__main__":
    main()
