"""A child answers, or is killed in time with all that it has started."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.patience import patient
from support.services import wait_until

from grpox.runtime import workers
from grpox.runtime.workers import Child, ChildCut, ChildEnded, ChildLate, Restarted

BEGIN = "from grpox.runtime.workers import connect_to_parent; parent = connect_to_parent()\n"
ECHO = BEGIN + "while True: parent.send_bytes(parent.recv_bytes())"


@pytest.fixture
def child() -> Iterator[Any]:
    """Start a child that runs a program, with whatever else `Child` takes."""
    with ExitStack() as stack:

        def start(program: str, stall: float = 60.0, **arguments: Any) -> Child:
            made = Child(["-c", program], stall, **arguments)
            stack.callback(made.kill)
            return made

        yield start


def soon(seconds: float = 60.0) -> float:
    return time.monotonic() + patient(seconds)


def test_messages_of_any_length_come_back(child: Any) -> None:
    echo = child(ECHO)
    for message in (b"", b"one\ntwo", bytes(3_000_000)):
        echo.send(message)
        assert echo.receive(soon()) == message


def test_a_child_that_is_late_is_killed_with_what_it_started(child: Any) -> None:
    late = child(
        BEGIN + "import subprocess, time\n"
        "other = subprocess.Popen(['sleep', '1000'])\n"
        "parent.send_bytes(str(other.pid).encode()); time.sleep(1000)"
    )
    other = psutil.Process(int(late.receive(soon())))
    with pytest.raises(ChildLate):
        late.receive(time.monotonic() + 0.05)
    assert not late.has_ended()
    late.kill()
    other.wait(patient(10))
    assert late.has_ended()
    assert late.pid not in psutil.pids()  # and is no zombie


def test_what_a_child_started_in_groups_of_their_own_ends_with_it(child: Any) -> None:
    made = child(
        BEGIN + "import subprocess, os, time\n"
        "other = subprocess.Popen(['sleep', '1000'], process_group=0)\n"
        "parent.send_bytes(str(other.pid).encode()); os._exit(3)"
    )
    other = psutil.Process(int(made.receive(soon())))
    assert made.end() == 3
    other.wait(patient(10))


def test_a_child_that_begins_after_its_parent_has_ended_ends_before_it_does_anything(
    child: Any, tmp_path: Path
) -> None:
    go, began = tmp_path / "go", tmp_path / "began"
    orphan = child(
        "import pathlib, time\n"
        f"while not pathlib.Path({str(go)!r}).exists(): time.sleep(0.01)\n"
        f"{BEGIN}pathlib.Path({str(began)!r}).touch()"
    )
    orphan._lifeline.close()  # as the kernel does for a parent that was killed
    go.touch()
    wait_until(orphan.has_ended, "it has ended", 20)
    assert not began.exists()


def test_a_child_that_has_ended_tells_its_code_and_what_it_printed(child: Any) -> None:
    ended = child("import sys; print('x' * 9000); print('why', file=sys.stderr); sys.exit(3)")
    with pytest.raises(ChildEnded):
        ended.receive(soon())
    assert ended.end() == 3
    assert ended.printed.endswith("x\nwhy") or ended.printed.startswith("why")
    assert len(ended.printed) <= workers.LAST_BYTES
    with pytest.raises(ChildEnded):
        ended.send(b"more")


def test_a_child_that_goes_on_without_its_connection_is_told_apart(
    child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(workers, "END_SECONDS", 0.05)
    silent = child(BEGIN + "import time; parent.close(); time.sleep(1000)")
    with pytest.raises(ChildEnded):
        silent.receive(soon())
    assert silent.end() is None


def test_an_answer_that_is_too_large_or_stops_in_its_midst_is_refused(
    child: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped = child(
        BEGIN + "import os, time; os.write(parent.fileno(), b'\\0\\0\\1\\0half'); time.sleep(1000)", stall=0
    )
    with pytest.raises(ChildCut):
        stopped.receive(soon())
    monkeypatch.setattr(workers, "MOST_BYTES", 10)
    echo = child(ECHO)
    echo.send(bytes(11))
    with pytest.raises(ChildCut):
        echo.receive(soon())


def test_a_child_that_does_not_read_is_late(child: Any) -> None:
    deaf = child("import time; time.sleep(1000)", stall=0)
    with pytest.raises(ChildLate):
        deaf.send(bytes(10_000_000))


def test_it_has_no_other_environment_than_it_is_given_and_nothing_to_read(child: Any) -> None:
    bare = child(
        "import json, os, socket, sys\nsocket.socket(fileno=0).sendall("
        "(lambda text: len(text).to_bytes(4, 'big') + text)(json.dumps(sorted(os.environ)).encode()))",
        environment={"ONE": "1"},
    )
    assert bare.receive(soon()) in (b'["LC_CTYPE", "ONE"]', b'["ONE"]')
    reads = child(BEGIN + "import sys; parent.send_bytes(repr(sys.stdin.read()).encode())")
    assert reads.receive(soon()) == b"''"


def test_one_that_was_stopped_is_started_again_until_it_is_closed() -> None:
    restarted = Restarted(lambda: Child(["-c", ECHO], 60.0))
    first = restarted.get()
    assert restarted.get() is first
    restarted.stop()
    assert first.has_ended()
    second = restarted.get()
    assert second is not first
    restarted.close()
    assert second.has_ended()
    with pytest.raises(ChildEnded):
        restarted.get()


def test_a_child_without_an_owner_is_killed() -> None:
    restarted = Restarted(lambda: Child(["-c", ECHO], 60.0))
    held = restarted.get()
    del restarted
    assert held.has_ended()
