"""The tutorials as their reader does them: files are written, commands are run, outputs are compared."""

from __future__ import annotations

import doctest
import os
import re
import shlex
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import util
from pathlib import Path

import pytest
from support import processes
from support.patience import patient
from support.ports import free_port
from support.services import wait_until

ROOT = Path(__file__).parents[2]
LEAVES = {
    "own-reward": "runs/exact/report.html",
    "production": "best-model/model.safetensors",
    "tools-and-environments": "runs/second/report.html",
    "vllm": "runs/server/report.html",
    "writing-a-plugin": "runs/quickstart/report.html",
}
"""Each tutorial, and the last thing that it makes."""
NO_VLLM = pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm)")
TUTORIALS = [pytest.param(name, marks=NO_VLLM if name == "vllm" else ()) for name in LEAVES]
BLOCK = re.compile(
    r'^```(?P<language>\w+)(?: title="(?P<title>[^"]+)")?\n(?P<text>.*?)^```$', re.MULTILINE | re.DOTALL
)
STATUS = "echo $?"
"""The command behind one that may fail."""
ELSEWHERE = "another terminal"
"""Beginning of the title of a block whose command runs until the page ends."""
PORT = "8111"
"""Port of a page's server, which is replaced here by a free one."""
OURS = re.compile(r"grpox [^;&|<>$`]*")
"""A command that is grpox alone. It is forked: a cold one would do the same, later."""
IN_ITS_ENVIRONMENT = """
import runpy, site, sys
site.addsitedir(sys.argv.pop(1))
runpy.run_module("grpox", run_name="__main__", alter_sys=True)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """Variables of a new environment in which grpox and pytest are commands, and pip uses no index."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    commands = tmp_path / "venv" / "bin"
    site = next((tmp_path / "venv").glob("lib/*/site-packages"))
    (site / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_paths()['purelib']!r})\n")
    for name in ("grpox", "pip", "pytest"):
        command = commands / name
        command.write_text(f'#!/bin/sh\nexec {commands}/python -m {name} "$@"\n')
        command.chmod(0o755)
    not_a_readers = ("GRPOX_SERVER_TOKEN", *processes.SET_BY_LIBRARIES)
    kept = {name: value for name, value in os.environ.items() if name not in not_a_readers}
    return kept | {
        "PATH": f"{commands}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "80",
        "OMP_NUM_THREADS": "1",
        "XDG_CONFIG_HOME": str(tmp_path / "config"),  # where a server leaves its token
        "PIP_NO_INDEX": "1",
        "PIP_NO_DEPS": "1",
        "PIP_NO_BUILD_ISOLATION": "0",  # which switches the isolation off
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def included(text: str) -> str:
    """A block with the files that it includes."""
    return re.sub(r'^--8<-- "(.+)"$', lambda at: (ROOT / at[1]).read_text().rstrip(), text, flags=re.MULTILINE)


def commands(block: str) -> Iterator[tuple[str, str]]:
    """(command, the output that is shown) of a console block."""
    for part in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
        command, _, shown = part.partition("\n")
        yield command, shown


def page(name: str) -> str:
    return (ROOT / "docs" / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", TUTORIALS)
def test_a_tutorial_does_what_it_shows(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    folder, status, done = tmp_path / "work", 0, 0
    folder.mkdir()
    with ExitStack() as terminals:
        for block in BLOCK.finditer(page(name).replace(PORT, str(free_port()))):
            if (block["title"] or "").startswith(ELSEWHERE):
                for command, shown in commands(block["text"]):
                    terminals.enter_context(another_terminal(command, shown, folder, environment))
                    done += 1
            elif block["title"]:
                path = folder / block["title"]
                assert path.parent.is_dir(), f"{path} is written before its package is made"
                path.write_text(included(block["text"]))
            elif block["language"] == "console":
                listed = list(commands(block["text"]))
                for index, (command, shown) in enumerate(listed):
                    if command.startswith("cd "):  # lasts beyond the command's own shell
                        folder /= command.removeprefix("cd ")
                        continue
                    ran = run(command, status, folder, environment)
                    status = ran.returncode
                    may_fail = index + 1 < len(listed) and listed[index + 1][0] == STATUS
                    assert status == 0 or may_fail, f"$ {command}\n{ran.stdout}{ran.stderr}"
                    assert_shown(command, shown, ran.stdout or ran.stderr)
                    done += 1
    assert done > 8
    assert (folder / LEAVES[name]).exists()


@contextmanager
def another_terminal(command: str, shown: str, folder: Path, environment: dict[str, str]) -> Iterator[None]:
    """A server that runs meanwhile, and is ended as by Ctrl-C; what it has printed by then is compared."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {command}"], cwd=folder, env=environment, stdout=subprocess.PIPE, text=True
    )
    token = Path(environment["XDG_CONFIG_HOME"], "grpox", "server-token")
    try:
        # A reader takes longer to type the next command than a server to make its token; a forked one does not.
        wait_until(token.exists, command, process=process)
        yield
        process.send_signal(signal.SIGINT)
        output = process.communicate(timeout=patient(60))[0]
    finally:
        process.kill()
        process.wait()
    assert_shown(command, shown, output)


def run(command: str, last: int, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """A command, in a shell in which the last one ended with a given status."""
    if OURS.fullmatch(command):
        [site] = Path(environment["PATH"].partition(os.pathsep)[0]).parent.glob("lib/*/site-packages")
        words = ["-c", IN_ITS_ENVIRONMENT, site, *shlex.split(command)[1:]]
        return processes.run(*words, cwd=folder, env={**environment, "GRPOX_SERVER_TOKEN": None})
    return subprocess.run(
        ["bash", "-c", f"(exit {last}); {command}"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patient(240),
        check=False,
    )


def assert_shown(command: str, shown: str, output: str) -> None:
    """Compare the printed output with the page, where ``...`` matches any text. The page may show no output at
    all."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    same = not shown.strip() or doctest.OutputChecker().check_output(shown, output, flags)
    assert same, f"$ {command}\nthe page shows\n{shown}\nand it prints\n{output}"


def test_the_tutorial_makes_the_example_distribution() -> None:
    """All of it that differs from what `grpox plugins new` writes, the README aside."""
    shown = {
        block["title"].removeprefix("grpox-gmpo/")
        for block in BLOCK.finditer(page("writing-a-plugin"))
        if block["title"]
    }
    example = ROOT / "plugins" / "examples" / "grpox-gmpo"
    written = {p.relative_to(example).as_posix() for p in example.rglob("*.py") if p.name != "__init__.py"}
    assert shown == {path for path in written if not path.startswith("build/")} | {"pyproject.toml"}
