"""Seconds of `grpox plugins list` with 30 plugins more, and without them."""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from surroundings import surroundings

GRPOX = str(Path(sys.executable).with_name("grpox"))
COUNT = 30
SPECIAL = {"broken": "import no_such_library_anywhere", "heavy": "import torch"}
"""Plugins that break a rule, made for tests; the benchmark has none of them."""

PLUGIN = '''"""Offers one loss."""

from grpox import ComponentSpec, hookimpl
{special}

@hookimpl
def grpox_losses():
    return [ComponentSpec("{loss}", target="{package}.loss:Reinforce", summary="-w A", api=1)]
'''

LOSS = '''from grpox.contracts import LossInputs, LossOutput, Reduction


class Reinforce:
    """-w A, the ratio w unclipped."""

    reduction = Reduction.TOKEN_MEAN

    def per_token(self, inputs: LossInputs) -> LossOutput:
        ratio = (inputs.logprobs - inputs.old_logprobs).exp()
        return LossOutput(-ratio * inputs.advantages, {})
'''


def make(folder: Path, special: Mapping[str, str], count: int = COUNT) -> None:
    """Put `count` distributions, ``grpox-many-heavy`` or ``grpox-many-3``, into a folder for PYTHONPATH.

    Every other one has a RECORD, as a wheel that was installed; the others are as a source tree.
    """
    names = [*special, *map(str, range(len(special), count))]
    for place, name in enumerate(names):
        package = f"grpox_many_{name}"
        plugin = PLUGIN.format(special=special.get(name, ""), loss=f"many-{name}", package=package)
        information = f"{package}-1.0.dist-info"
        files = {
            f"{package}/__init__.py": "",
            f"{package}/plugin.py": plugin,
            f"{package}/loss.py": LOSS,
            f"{information}/METADATA": f"Metadata-Version: 2.1\nName: grpox-many-{name}\nVersion: 1.0\n"
            "Requires-Dist: grpox\n",
            f"{information}/entry_points.txt": f"[grpox]\nplugin = {package}.plugin\n",
        }
        if place % 2:
            record = "".join(f"{path},{hash_of(text)},{len(text)}\n" for path, text in files.items())
            files[f"{information}/RECORD"] = f"{record}{information}/RECORD,,\n"
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)


def hash_of(text: str) -> str:
    """As RECORD has it."""
    digest = hashlib.sha256(text.encode()).digest()
    return f"sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')}"


def seconds(environment: dict[str, str]) -> float:
    """Measure one `grpox plugins list`, including start and end of the process."""
    started = time.perf_counter()
    command = [GRPOX, "plugins", "list"]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def measure(folder: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, with the plugins and without them, in turns."""
    path = os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH", "")]))
    environments = {"with them": os.environ | {"PYTHONPATH": path}, "without them": dict(os.environ)}
    measured: dict[str, list[float]] = {name: [] for name in environments}
    for place in range(repeats + 1):
        for name, environment in environments.items():
            taken = seconds(environment)
            if place:  # the first writes bytecode
                measured[name].append(taken)
    return measured


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="runs of each (default: 10)")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="only make the distributions there")
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.make, SPECIAL)
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), {})
        measured = measure(Path(folder), arguments.repeats)
    print(f"{'plugins list':14} {'median':>7} {'least':>7}")
    for name, times in measured.items():
        print(f"{name:14} {statistics.median(times):5.2f} s {min(times):5.2f} s")
    print(
        json.dumps(
            {"plugins": COUNT, "seconds": measured, **surroundings(["grpox", "typer", "rich", "pluggy"])}
        )
    )


if __name__ == "__main__":
    main()
