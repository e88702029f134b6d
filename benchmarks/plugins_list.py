"""Seconds of `grpox plugins list` with 30 plugins more, of which one is broken and two are slow to import.

Cold is the first time, when every plugin is imported; warm is every other, when none is.
"""

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
from pathlib import Path

from surroundings import surroundings

GRPOX = str(Path(sys.executable).with_name("grpox"))
COUNT = 30
SPECIAL = {"broken": "import no_such_library_anywhere", "heavy": "import torch", "slow": "time.sleep(2)"}

PLUGIN = '''"""Offers one loss; leaves a file beside it when it is imported."""

import time
from pathlib import Path

from grpox import ComponentSpec, hookimpl

(Path(__file__).parent / "imported").touch()
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


def make(folder: Path, count: int = COUNT) -> None:
    """Put `count` distributions, ``grpox-many-slow`` or ``grpox-many-3``, into a folder for PYTHONPATH.

    Every other one has a RECORD, as a wheel that was installed; the others are as a source tree.
    """
    names = [*SPECIAL, *map(str, range(len(SPECIAL), count))]
    for place, name in enumerate(names):
        package = f"grpox_many_{name}"
        plugin = PLUGIN.format(special=SPECIAL.get(name, ""), loss=f"many-{name}", package=package)
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
    """Of one `grpox plugins list`, start and end of the process included."""
    started = time.perf_counter()
    command = [GRPOX, "plugins", "list"]
    subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def measure(folder: Path, repeats: int) -> dict[str, list[float]]:
    """Seconds of each run, without the plugins and with them."""
    bare = os.environ | {"GRPOX_CACHE_DIR": str(folder / "cache-bare")}
    path = os.pathsep.join(filter(None, [str(folder / "site"), os.environ.get("PYTHONPATH", "")]))
    many = os.environ | {"GRPOX_CACHE_DIR": str(folder / "cache"), "PYTHONPATH": path}
    seconds(bare)
    return {
        "cold": [seconds(many)],
        "warm": [seconds(many) for _ in range(repeats)],
        "without them": [seconds(bare) for _ in range(repeats)],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="warm runs (default: 10)")
    parser.add_argument("--make", type=Path, metavar="FOLDER", help="only make the distributions there")
    arguments = parser.parse_args()
    if arguments.make:
        make(arguments.make)
        return
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder, "site"))
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
