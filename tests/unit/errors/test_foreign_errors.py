"""Exceptions of foreign code: whatever they hold, they are told in a bounded text and break nothing."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pluggy
import pytest
from support.patience import patient

from grpox.config import RunConfig
from grpox.contracts import RunContext
from grpox.data.open_data import reason
from grpox.errors import TEXT, TRACE, RunFailed, chain, describe, text_of, traceback_of
from grpox.observing.observers import Observers
from grpox.observing.record import LocalRecord
from grpox.plugins import hookspecs
from grpox.plugins.hookspecs import hookimpl
from grpox.plugins.load_object import load_object
from grpox.policy.models import _unloadable
from grpox.rollout.rewards.named import RewardCall
from grpox.runtime.foreign_code import call
from grpox.runtime.phases import ran_out_of_memory
from grpox.runtime.world import describe_failure

CONFIG = RunConfig.model_validate({"model": {"path": "m"}, "data": {"path": "d.jsonl"}, "rewards": ["math"]})
LONG = 10_000_000


class NoText(RuntimeError):
    def __str__(self) -> str:
        return 7  # type: ignore[return-value]


class Interrupts(RuntimeError):
    def __str__(self) -> str:
        raise KeyboardInterrupt


class OwnNotes(RuntimeError):
    @property
    def __notes__(self) -> Any:  # type: ignore[override]
        raise KeyboardInterrupt


def long() -> RuntimeError:
    return RuntimeError("x" * LONG)


def long_notes() -> RuntimeError:
    error = RuntimeError("short")
    error.add_note("y" * LONG)
    error.add_note("line\n" * 100_000)
    return error


def strange_notes() -> RuntimeError:
    error = RuntimeError("short")
    error.__notes__ = 3  # type: ignore[assignment]
    return error


HOSTILE: list[Callable[[], RuntimeError]] = [long, long_notes, strange_notes, NoText, Interrupts, OwnNotes]


def raiser(error: Exception) -> Callable[..., Any]:
    def broken(**_: Any) -> Any:
        raise error

    return broken


def failed(method: Callable[[], Any]) -> str:
    with pytest.raises(RunFailed) as caught:
        call("loss", method)
    return str(caught.value)


def observed(error: Exception) -> str:
    class Broken:
        @hookimpl
        def grpox_step_finished(self) -> None:
            raise error

    manager, output = pluggy.PluginManager("grpox"), io.StringIO()
    manager.add_hookspecs(hookspecs)
    observers = Observers(manager, [("broken", Broken())])
    observers.step_finished(RunContext(CONFIG, Path("/"), 1, 1, {}, None, "run.yaml"), 1, {})
    return output.getvalue()


def rewarded(error: Exception) -> str:
    made = RewardCall(raiser(error), {}, 1)
    made.run()
    return made.failure


@pytest.mark.parametrize("make", HOSTILE)
@pytest.mark.parametrize(
    "tell",
    [
        describe,
        describe_failure,
        reason,
        lambda error: failed(raiser(error)),
        observed,
        rewarded,
        lambda error: str(_unloadable("model", CONFIG.model, error)),
    ],
)
def test_what_an_exception_says_is_bounded_wherever_it_is_told(
    tell: Callable[[Exception], str], make: Callable[[], RuntimeError]
) -> None:
    assert len(tell(make())) < TEXT + 300


@pytest.mark.parametrize("make", HOSTILE)
def test_a_traceback_and_the_record_of_a_failure_are_bounded(
    make: Callable[[], RuntimeError], tmp_path: Path
) -> None:
    error = make()
    with pytest.raises(RuntimeError):
        raiser(error)()
    told = traceback_of(error)
    assert type(error).__name__ in told
    assert len(told) <= TRACE
    assert all(len(line) <= TEXT for line in told.splitlines())
    LocalRecord().grpox_run_failed(RunContext(CONFIG, tmp_path, 1, 1, {}, None, "run.yaml"), error)
    told = json.loads((tmp_path / "failure.json").read_text(encoding="utf-8"))["error"]
    assert told.startswith(type(error).__name__)
    assert len(told) < TEXT + 100


def test_a_long_or_ringed_chain_is_told_in_short() -> None:
    error: Exception = ValueError("the first")
    for number in range(1000):
        new = ValueError(f"number {number} " + "x" * 100)
        new.__cause__ = error
        error = new
    told = traceback_of(error)
    assert len(told) <= TRACE
    assert told.startswith("ValueError: the first\n")
    assert "number 999" in told
    # One that was raised from itself is told once.
    error = ValueError("a ring")
    error.__cause__ = error
    assert list(chain(error)) == [error]
    assert reason(error) == "ValueError: a ring"
    assert not ran_out_of_memory(error)
    made = RewardCall(raiser(error), {}, 1)
    made.run()
    assert not made.needs_main_thread()


def test_a_secret_at_the_place_of_the_cut_is_not_shown_in_part() -> None:
    secret = "hf_" + "Ab1Cd2Ef3Gh4Jk5Lm6Np7" * 2
    for before in range(1440, 1500, 5):
        told = text_of(RuntimeError("." * before + f" {secret} " + "." * 9000))
        assert "Ab1Cd2" not in told


def test_a_file_that_raises_on_import_is_told_whatever_it_raises(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("class Mute(Exception):\n    def __str__(self): raise KeyboardInterrupt\nraise Mute\n")
    with pytest.raises(Exception, match=r"mine\.py:3: Mute: its message cannot be read: KeyboardInterrupt"):
        load_object(f"{file}:Loss")


def test_a_command_ends_on_any_exception_with_a_short_message() -> None:
    program = (
        "import sys\n"
        "from grpox.cli.errors import run_command\n"
        "from grpox.errors import RunFailed\n"
        "class Mute(Exception):\n"
        "    def __str__(self): raise KeyboardInterrupt\n"
        "for error in (Mute(), ValueError('x' * 10_000_000), RunFailed('x' * 10_000_000)):\n"
        "    for arguments in ([], ['--traceback']):\n"
        "        def command(_): raise error\n"
        "        print(run_command(command, arguments), file=sys.stderr)\n"
        "        print('next', file=sys.stderr)\n"
    )
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patient(60), check=True)
    told = done.stderr.split("next\n")[:-1]
    assert len(told) == 6
    for text in told:
        assert text.endswith("\n1\n")
        assert "error: " in text
        assert len(text) < TRACE + 3 * TEXT
    assert told[0].startswith("error: Mute: its message cannot be read: KeyboardInterrupt\n")
