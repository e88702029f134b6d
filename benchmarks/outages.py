"""Takes the MLflow server from training runs at random moments, and counts what its history lacks or has twice.

A server is killed with SIGKILL, stopped with SIGSTOP (it accepts and never answers), or replaced for a while by
one that answers everything with an error 500. In each run the training is killed besides, and resumed from
its last checkpoint. The first run begins without a server, and of the last the server never comes back.
Afterwards `grpox sync` runs twice.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from surroundings import surroundings

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "integration"))
from killing import kill, start, wait_for_steps
from mlflow_serving import Server, history, recorded_values

TRACKER = Path(__file__).with_name("timed_tracker.py")
RESULTS = Path(__file__).with_name("results") / "outages.json"
SETTINGS = (
    "quickstart",
    "train.per_device_train_batch_size=32",
    "checkpoint.every=10",
    "evaluation.every=25",
    "rewards=[{path: 'slow.py:slow'}]",
    "evaluation.accuracy=slow",
)
SLOW = """
import time
from pathlib import Path


def slow(completions, **_):
    time.sleep(0.2)
    while Path("hold").exists():
        time.sleep(0.05)
    return [float(len(completion)) for completion in completions]
"""
KINDS = ("killed", "stopped", "errors")


class Errors(BaseHTTPRequestHandler):
    """Answers everything with 500."""

    def _refuse(self) -> None:
        self.send_error(500)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _refuse

    def log_message(self, *_: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--outages", type=int, default=20, help="default: 20")
    parser.add_argument("--runs", type=int, default=4, help="default: 4")
    parser.add_argument("--steps", type=int, default=200, help="of a run; default: 200")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--output", type=Path, default=RESULTS)
    given = parser.parse_args()
    moments = random.Random(given.seed)
    kinds = [KINDS[number % len(KINDS)] for number in range(given.outages)]
    moments.shuffle(kinds)
    total: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "slow.py").write_text(SLOW)
        server = Server(folder / "server")
        try:
            for number in range(given.runs):
                share = kinds[number :: given.runs]
                last = number == given.runs - 1
                total += one_run(folder, server, number, given.steps, share, moments, last)
                print(f"run {number + 1} of {given.runs}: {dict(total)}", file=sys.stderr, flush=True)
        finally:
            server.kill()
        longest = _longest(folder / "hooks.txt")
    found: dict[str, Any] = {"outages": given.outages, "kinds": dict(Counter(kinds)), "runs": given.runs}
    found |= {"training_kills": given.runs, "steps_per_run": given.steps}
    found |= {name: total[name] for name in ("expected", "lost", "doubled", "wrong", "after_second_sync")}
    found |= {"shipped_by_sync": total["by_sync"], "longest_hook_seconds": longest}
    found |= {"command": " ".join(["python", "benchmarks/outages.py", *sys.argv[1:]])}
    text = json.dumps(found | surroundings(["grpox", "mlflow", "torch"]))
    given.output.write_text(text + "\n", encoding="utf-8")
    print(text)


def one_run(
    folder: Path,
    server: Server,
    number: int,
    steps: int,
    kinds: list[str],
    moments: random.Random,
    forsaken: bool,
) -> Counter[str]:
    """Train, with these outages and one kill of the training itself; what became of the run's values.

    Args:
        forsaken: the server does not come back before the run ends.
    """
    run = folder / "runs" / str(number)
    tracking = f"tracking={{timed: {{path: '{TRACKER}:TimedTracker', tracking_uri: '{server.uri}'}}}}"
    arguments = (*SETTINGS, f"train.max_steps={steps}", f"output_dir=runs/{number}", tracking)
    process = start(folder, *arguments)
    assert wait_for_steps(process, run, 1), process.communicate()[1]
    hold = folder / "hold"
    if number == 0:
        restart(server, hold)  # late
    killed_at = moments.randrange(len(kinds))
    for place, kind in enumerate(kinds):
        time.sleep(moments.uniform(0.5, 4))
        assert process.poll() is None, process.communicate()[1] or "the run has ended already: more --steps"
        with outage(server, kind, hold):
            time.sleep(moments.uniform(1, 6))
            if place == killed_at:
                kill(process)
                process = start(folder, *arguments, "--resume", "auto")
                time.sleep(moments.uniform(1, 20))
    if forsaken:
        server.stop()
    stderr = process.communicate()[1]
    assert process.returncode == 0, stderr
    server.go_on()
    return judged(folder, run, server)


def judged(folder: Path, run: Path, server: Server) -> Counter[str]:
    """Compare MLflow's data of a run with the data that the run recorded."""
    before = _values(server, run)
    _sync(folder, run)
    there = _values(server, run)
    _sync(folder, run)
    expected = {(name, step) for name, step, *_ in recorded_values(run)}
    known = recorded_values(run).keys() | recorded_values(run, "metrics.undone.jsonl").keys()
    places = Counter((name, step) for name, step, *_ in there.elements())
    return Counter(
        expected=len(expected),
        lost=len(expected - places.keys()),
        doubled=sum(count - 1 for count in places.values()),
        wrong=len(there.keys() - known),
        by_sync=(there - before).total(),
        after_second_sync=(_values(server, run) - there).total(),
    )


def _values(server: Server, run: Path) -> Counter[Any]:
    found = [stored for stored in server.runs() if stored.data.tags["grpox.output_dir"] == str(run)]
    assert len(found) <= 1, f"{len(found)} runs of {run}"
    return history(server.client, found[0]) if found else Counter()


def _sync(folder: Path, run: Path) -> None:
    subprocess.run([sys.executable, "-m", "grpox", "sync", str(run)], cwd=folder, check=True, stdout=sys.stderr)


def restart(server: Server, hold: Path) -> None:
    """Start the server, which takes as long as many steps; the training is held meanwhile."""
    hold.touch()
    server.start()
    hold.unlink()


@contextmanager
def outage(server: Server, kind: str, hold: Path) -> Iterator[None]:
    """The server is away within it, and answers afterwards."""
    if kind == "stopped":
        server.stop()
        yield
        server.go_on()
        return
    server.kill()
    if kind == "errors":
        with ThreadingHTTPServer(("127.0.0.1", server.port), Errors) as errors:
            threading.Thread(target=errors.serve_forever, daemon=True).start()
            yield
            errors.shutdown()
    else:
        yield
    restart(server, hold)


def _longest(hooks: Path) -> dict[str, float]:
    """Seconds of the longest call of each hook."""
    longest: dict[str, float] = {}
    for line in hooks.read_text(encoding="utf-8").splitlines():
        hook, seconds = line.split()
        longest[hook] = max(longest.get(hook, 0.0), float(seconds))
    return longest


if __name__ == "__main__":
    main()
