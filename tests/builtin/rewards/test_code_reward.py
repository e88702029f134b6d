"""The reward that runs code: what passes, and that no completion passes, harms or learns by other means."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from support.logs import LoggedText
from support.patience import patient
from support.services import is_running, wait_until

from grpox.errors import ConfigError
from grpox_rewards.code import Code, Judgement, code_in, run_program, run_tests
from grpox_rewards.configs import CodeConfig

LIMITS = CodeConfig(timeout_seconds=20.0, memory_mib=512)
RIGHT = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(2, 3) == 5", "assert add(-1, 1) == 0"]
PAIRS = [{"input": "2 3\n", "output": "5\n"}, {"input": "-1 1", "output": "0"}]
POINT = (
    "import pickle\n"
    "from dataclasses import dataclass\n"
    "@dataclass\n"
    "class Point:\n"
    "    x: int\n"
    "def same(x): return pickle.loads(pickle.dumps(Point(x))) == Point(x)\n"
    "def kinds(): return Point.__annotations__ == {'x': int}\n"
)


@pytest.fixture(scope="module")
def lacking() -> tuple[str, ...]:
    """Name the parts that this kernel cannot take away."""
    return run_tests("", [], LIMITS).lacking


@pytest.fixture
def confined(lacking: tuple[str, ...]) -> None:
    """Skip where the kernel cannot take away everything."""
    if lacking:
        pytest.skip(f"this kernel cannot take away {', '.join(lacking)}")


def scores(*completions: str, tests: Any = TESTS, **config: Any) -> list[float | None]:
    reward = Code(CodeConfig(timeout_seconds=20.0, **config))
    return reward(completions=completions, tests=[tests] * len(completions))


# -- What passes -----------------------------------------------------------------------------------------


def test_all_tests_or_a_part_of_them_make_the_score() -> None:
    half = "def add(a, b):\n    return abs(a) + b\n"
    assert scores(RIGHT, half, "def add(a, b): return 7", "no code") == [1.0, 0.0, 0.0, 0.0]
    assert scores(RIGHT, half, "def add(a, b): return 7", partial=True) == [1.0, 0.5, 0.0]
    # Programs are compared by what they write.
    program = "a, b = map(int, input().split())\nprint(a + b, ' ')\n"
    assert scores(program, "print(5)", tests=PAIRS) == [1.0, 0.0]
    assert scores(program, "print(5)", tests=PAIRS, partial=True) == [1.0, 0.5]
    assert scores("print(5)\nraise SystemExit(1)", "print(5)\n1 / 0", tests=PAIRS[:1]) == [0.0, 0.0]
    lines = "print(Point(3).x, same(3), kinds())\nimport __main__\nprint(__main__.Point is Point)\n"
    assert run_program(POINT + lines, "", LIMITS).output == "3 True True\nTrue\n"


@pytest.mark.parametrize(
    "program",
    [
        "print(5)\nexit()",
        "print(5)\nquit(0)\nprint(6)",
        "import sys\nprint(5)\nsys.stdout.close()",
        "import atexit, os\natexit.register(lambda: os.write(1, b'5'))",
        "out = open(1, 'w', closefd=False)\nout.write('5')",
        "def main():\n    out = open('/dev/stdout', 'w')\n    out.write('5')\n    exit()\nmain()",
    ],
)
def test_a_program_ends_as_it_does_in_python(program: str) -> None:
    alone = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True, text=True)
    assert run_program(program, "", LIMITS).output == alone.stdout
    assert alone.stdout.strip() == "5"


def test_the_last_fenced_block_is_the_code_or_else_the_whole_text_and_no_tests_no_score() -> None:
    assert code_in("first\n```python\na\n```\nthen\n```\nb\nc\n```\nend") == "b\nc\n"
    assert code_in("a = 1") == "a = 1"
    assert scores(f"Here it is:\n```python\n{RIGHT}```\nIt adds.") == [1.0]
    assert Code(CodeConfig())(completions=[RIGHT] * 3, tests=[None, [], ""]) == [None] * 3


PASSING: dict[str, tuple[str, list[str]]] = {
    "names that the code defines": (
        "import collections\n"
        "class Stack:\n"
        "    def __init__(self): self.held = []\n"
        "    def push(self, x): self.held.append(x); return self\n"
        "    def top(self): return self.held[-1]\n"
        "def evens(n): return (x for x in range(n) if x % 2 == 0)\n"
        "def count(text):\n"
        "    found = collections.defaultdict(int)\n"
        "    for c in text: found[c] += 1\n"
        "    return found\n"
        "def root(x): return x ** 0.5\n"
        "LIMIT = 3\n",
        [
            "stack = Stack()\nassert stack.push(1).push(2).top() == 2\nassert stack.held == [1, 2]",
            "assert list(evens(5)) == [0, 2, 4]",
            "assert count('abca') == {'a': 2, 'b': 1, 'c': 1}",
            "import math\nassert math.isclose(root(2), 1.41421356, rel_tol=1e-6)",
            "def check(candidate):\n    assert candidate(9) == 3.0\ncheck(root)",
            "assert LIMIT == 3",
        ],
    ),
    "an object's length, items and text": (
        "class Table:\n"
        "    def __init__(self): self.held = {}\n"
        "    def __len__(self): return len(self.held)\n"
        "    def __getitem__(self, key): return self.held[key]\n"
        "    def __setitem__(self, key, value): self.held[key] = value\n"
        "    def __str__(self): return f'a table of {len(self)}'\n"
        "class Plain: pass\n",
        [
            "table = Table()\ntable['a'] = [1]\n"
            "assert len(table) == 1 and table['a'] == [1] and str(table) == 'a table of 1'",
            "try:\n    Table()['b']\n    assert False\nexcept KeyError as why: assert why.args == ('b',)",
            *(
                f"try:\n    {use}\nexcept TypeError: pass\nelse: assert False"
                for use in ("len(Plain())", "Plain()[0]", "iter(Plain())")
            ),
        ],
    ),
    "values in their kind, with their parts in common": (
        "import asyncio, enum\n"
        "class Colour(str, enum.Enum): RED = 'red'\n"
        "async def later(x):\n"
        "    await asyncio.sleep(0)\n"
        "    return x\n"
        "def wait(x): return asyncio.run(later(x))\n"
        "def apply(f, values): return [f(x) for x in values]\n"
        "def grid(): return [[0] * 2] * 2\n"
        "def colour(): return Colour.RED\n"
        "def halves(): return '\\ud83d\\ude00'\n"
        "loop = [7]\n"
        "loop.append(loop)\n"
        "twins = []\n"
        "for _ in range(60): twins = [twins, twins]\n"
        "nest = []\n"
        "for _ in range(2000): nest = [nest]\n",
        [
            "import math\nassert apply(str.upper, ['a']) == ['A'] and apply(math.sqrt, [4.0]) == [2.0]",
            "rows = grid()\nrows[0][0] = 1\nassert rows == [[1, 0], [1, 0]]",
            "assert colour() == 'red'",
            "assert len(halves()) == 2 and halves() != '\U0001f600'",
            "assert loop[0] == 7 and loop[1][1][0] == 7",
            "assert twins[0] is twins[1]",
            "import threading\n"
            "found = []\n"
            "asking = [threading.Thread(target=lambda n=n: found.append((n, wait(n)))) for n in range(9)]\n"
            "for each in asking: each.start()\n"
            "for each in asking: each.join()\n"
            "assert sorted(found) == [(n, n) for n in range(9)]",
        ],
    ),
    "a module of its own": (
        POINT,
        [
            "assert Point(3).x == 3",
            "assert same(3)",
            "assert kinds()",
            "from dataclasses import dataclass\n@dataclass\nclass Mine:\n    x: int\nassert Mine(3).x == 3",
        ],
    ),
    "exceptions of the code as those of Python's that they are": (
        "import json\n"
        "class Mine(LookupError):\n"
        "    def __str__(self): return 'mine'\n"
        "def find(what): return {}[what]\n"
        "def text(data): return data.decode('ascii')\n"
        "def mine(): raise Mine(1, [2])\n"
        "def group(): raise ExceptionGroup('two', [ValueError(1)])\n"
        "load = json.loads\n",
        [
            f"try:\n    {call}\n    assert False\nexcept {caught}"
            for call, caught in (
                ("find('a')", "KeyError as why: assert why.args == ('a',)"),
                ("text(b'\\xff')", "UnicodeDecodeError as why: assert why.start == 0"),
                ("load('{')", "ValueError: pass"),
                ("mine()", "LookupError as why: assert str(why) == 'mine'"),
                ("group()", "Exception as why: assert 'two' in str(why)"),
            )
        ],
    ),
    "arguments that a function changes": (
        "def turn(values): values.reverse()\n",
        [
            f"from collections import deque\nvalues = {made}\nturn({given})\nassert list(values) == [2, 1]"
            for made in ("[1, 2]", "deque([1, 2])", "bytearray([1, 2])")
            for given in ("values", "values=values")
        ],
    ),
}
"""Code, and tests that use what it defines as if it were theirs."""


@pytest.mark.parametrize("name", PASSING)
def test_code_and_tests_work_together_as_in_one_process(name: str) -> None:
    code, tests = PASSING[name]
    assert run_tests(code, tests, LIMITS).passed == [True] * len(tests)


# -- What does not pass ----------------------------------------------------------------------------------

CHANNEL = (
    "import os, sys\n"
    "frame = sys._getframe()\n"
    "while 'channel' not in frame.f_locals: frame = frame.f_back\n"
    "channel = frame.f_locals['channel']\n"
)
"""Code by which a completion finds the channel between its process and the judge."""
CHEATS = {
    "leaves before the tests": "import os\nos._exit(0)",
    "leaves when it is called": "import os\ndef add(a, b): os._exit(0)",
    "sys.exit": "import sys\nsys.exit(0)",
    "sys.exit when it is called": "import sys\ndef add(a, b): sys.exit(0)",
    "prints the verdict": "print('{\"passed\": [true, true]}')\nprint('2 passed')",
    "writes the verdict everywhere": (
        "import os\n"
        "for fd in range(64):\n"
        '    try: os.write(fd, b\'{"passed": [true, true], "late": false, "lacking": []}\')\n'
        "    except OSError: pass\n"
        "def add(a, b): return None"
    ),
    "equals everything": (
        "class Any:\n"
        "    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "    def __hash__(self): return 0\n"
        "    def __bool__(self): return True\n"
        "def add(a, b): return Any()"
    ),
    "an int that equals everything": (
        "class Any(int):\n    def __eq__(self, other): return True\ndef add(a, b): return Any(7)"
    ),
    "patches builtins": (
        "import builtins\n"
        "builtins.AssertionError = type('Quiet', (Exception,), {})\n"
        "builtins.exec = builtins.compile = lambda *a, **k: None\n"
        "__builtins__ = {}\n"
        "def add(a, b): return None"
    ),
    "patches what judges": (
        "import sys\n"
        "judge = sys.modules['__main__']\n"
        "judge._passes = judge._tested = lambda *a: True\n"
        "def add(a, b): return None"
    ),
    "looks for the tests in memory": (
        "import gc, re\n"
        "found = [x for o in gc.get_objects() if isinstance(o, (list, dict, tuple))\n"
        "         for x in (o.values() if isinstance(o, dict) else o) if isinstance(x, (str, bytes))]\n"
        "def add(a, b):\n"
        "    for x in map(str, found):\n"
        "        m = re.search(r'assert add\\(%d, %d\\) == (-?\\d+)$' % (a, b), x)\n"
        "        if m: return int(m[1])"
    ),
    "reads what the judge is told": (
        "import os\n"
        "try: told = open('/proc/%d/fd/0' % os.getppid()).read()\n"
        "except OSError: told = ''\n"
        "def add(a, b): return 5 if '5' in told else None"
    ),
    "floods the judge": (
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'\\xff' * 100000)\n    except OSError: pass"
    ),
    "sends the judge a pickle that would run code": (
        "import pickle, os\n"
        "class Evil:\n    def __reduce__(self): return os.system, ('true',)\n"
        f"{CHANNEL}"
        "channel.send(pickle.dumps(Evil()))\n"
    ),
    "sends the judge a pickle that would change how its types compare": (
        f"{CHANNEL}"
        "equal = b'cfractions\\nFraction\\n(N}X\\x06\\0\\0\\0__eq__cbuiltins\\nstr\\nstb'\n"
        "channel.send(b'\\x80\\x04}X\\x03\\0\\0\\0add' + equal + b's.')\n"
        "answer = b'\\x80\\x04(I01\\ncfractions\\nFraction\\n)Rcbuiltins\\nlist\\n)Rt.'\n"
        "for _ in range(9): channel.send(answer)\n"
    ),
    "has the judge look a name up": (
        f'{CHANNEL}channel.send(b\'[["name","builtins","bool"],["dict","add",[0]],["tuple",[1]]]\')\n'
    ),
    "announces four gigabytes": f"{CHANNEL}os.write(4, b'\\xff' * 4 + b'[' * 1000)",
    "nests a message that ends its channel": f"{CHANNEL}channel.send(b'[' * 10**6 + b']' * 10**6)",
    "raises what ends a loop": "def add(a, b): raise StopIteration",
    "kills the judge": "import os\ntry: os.kill(os.getppid(), 9)\nexcept OSError: pass",
}


@pytest.mark.parametrize("name", CHEATS)
def test_no_completion_passes_by_other_means(name: str) -> None:
    made = run_tests(CHEATS[name], TESTS, LIMITS)
    assert made.passed == [False, False]


FAILING: dict[str, tuple[str, str]] = {
    "a redefined builtin": ("def abs(x): return 0\ndef f(x): return 9", "assert abs(f(1) - 1) < 0.1"),
    "a redefined module": (
        "def near(a, b): return True\nclass math: isclose = near\ndef f(x): return 9",
        "import math\nassert math.isclose(f(1), 1)",
    ),
    "StopIteration in a loop of the test": (
        "def add(a, b): raise StopIteration",
        "assert all(map(lambda each: add(*each) == sum(each), [(1, 2), (3, 4)]))",
    ),
    "StopIteration in its map": (
        "def add(a, b): raise StopIteration",
        "for each in map(add, [1, 3], [2, 4]): assert each in (3, 7)",
    ),
    "a file that a Python of the test would import": (
        "open('json.py', 'w').write('held = 5')\ndef add(a, b): return 7",
        "import subprocess, sys\n"
        "said = subprocess.run([sys.executable, '-c', 'import json; print(json.held)'], capture_output=True)\n"
        "assert said.stdout == b'5\\n'",
    ),
    "what the test prints": (
        "def add(a, b): return '{\"passed\": [true]}\\n' * 10000",
        "import sys\nprint(add(2, 3))\nprint(add(2, 3), file=sys.stderr)\nassert add(2, 3) == 5",
    ),
    "an object that would be true": ("class Yes: pass\ndef even(n): return Yes()", "assert even(4)"),
    "an object that would be false": ("class Yes: pass\ndef even(n): return Yes()", "assert not even(3)"),
}
"""Code, and a test that it does not pass by this means."""


@pytest.mark.parametrize("name", FAILING)
def test_code_passes_no_test_by_this_means(name: str) -> None:
    code, test = FAILING[name]
    assert run_tests(code, [test], LIMITS).passed == [False]
    if "add" in test and "subprocess" not in test:
        assert run_tests(RIGHT, [test], LIMITS).passed == [True]


def test_code_that_does_not_return_fails_a_test_that_expects_any_exception() -> None:
    test = "good = False\ntry: add(1, 2)\nexcept: good = True\nassert good"
    for body in ("os._exit(0)", "raise SystemExit", "os.closerange(0, 64)"):
        assert run_tests(f"import os\ndef add(a, b): {body}", [test], LIMITS).passed == [False]
    made = run_tests("def add(a, b):\n    while True: pass", [test], CodeConfig(timeout_seconds=0.3))
    assert (made.passed, made.late) == ([False], True)


# -- What it cannot reach --------------------------------------------------------------------------------

PROBE = """
import ctypes, fcntl, json, os, socket, struct, subprocess, sys, threading
told = {}
libc = ctypes.CDLL(None, use_errno=True)
def called(name, *given):
    if getattr(libc, name)(*given) < 0: raise OSError(ctypes.get_errno(), name)
to_trainer = struct.pack("i", %(trainer)d)
ends = socket.socketpair()
def tried(name, does):
    try: told[name] = repr(does())[:200]
    except BaseException as error: told[name] = type(error).__name__
tried("environment", lambda: dict(os.environ))
tried("arguments", lambda: sys.argv)
tried("socket", socket.socket)
tried("connect", lambda: socket.create_connection(("127.0.0.1", 9), 1))
tried("fork", os.fork)
tried("spawn", lambda: subprocess.run(["true"]))
tried("thread", lambda: threading.Thread(target=print).start())
tried("kill", lambda: os.kill(%(trainer)d, 0))
tried("kill all", lambda: os.kill(-1, 0))
tried("its environment", lambda: open("/proc/%(trainer)d/environ").read())
tried("its memory", lambda: open("/proc/%(trainer)d/mem", "rb"))
tried("read", lambda: open(%(secret)r).read())
tried("list", lambda: os.listdir(%(folder)r))
tried("write", lambda: open(%(secret)r, "a"))
tried("remove", lambda: os.remove(%(secret)r))
tried("chmod", lambda: os.chmod(%(secret)r, 0o777))
tried("truncate", lambda: os.truncate(%(secret)r, 0))
tried("attribute", lambda: os.removexattr(%(secret)r, "user.any"))
tried("watch", lambda: called("inotify_init1", 0))
tried("owner of signals", lambda: fcntl.fcntl(ends[0], fcntl.F_SETOWN, %(trainer)d))
tried("group of signals", lambda: fcntl.fcntl(ends[0], fcntl.F_SETOWN, -%(trainer)d))
tried("which signal", lambda: fcntl.fcntl(ends[0], fcntl.F_SETSIG, 9))
tried("signals", lambda: fcntl.fcntl(ends[0], fcntl.F_SETFL, os.O_RDWR | os.O_ASYNC))
tried("FIOASYNC", lambda: fcntl.ioctl(ends[0], 0x5452, struct.pack("i", 1)))
tried("SIOCSPGRP", lambda: fcntl.ioctl(ends[0], 0x8902, to_trainer))
tried("FIOSETOWN", lambda: fcntl.ioctl(ends[0], 0x8901, to_trainer))
tried("TIOCSTI", lambda: fcntl.ioctl(0, 0x5412, b"x"))
tried("datagrams", lambda: socket.socketpair(type=socket.SOCK_DGRAM)[0].sendto(b"out", %(socket)r))
tried("session", os.setsid)
tried("group", lambda: os.setpgid(0, 0))
tried("outlive", lambda: called("prctl", 1, 0, 0, 0, 0))
tried("memory file", lambda: os.memfd_create("any"))
tried("memory of others", lambda: called("shmctl", 0, 14, bytes(256)))
tried("own file", lambda: (open("own", "w").write("mine"), open("own").read()))
tried("large file", lambda: open("large", "wb").write(b"x" * (32 << 20)))
tried("imports", lambda: [__import__(m).__name__ for m in ("math", "re", "json", "heapq", "decimal", "random")])
print(json.dumps(told))
"""
REFUSED = {
    *("socket", "connect", "fork", "spawn", "kill", "kill all", "its environment", "its memory"),
    *("read", "list", "write", "remove", "chmod", "truncate", "attribute", "watch"),
    *("owner of signals", "group of signals", "which signal", "signals"),
    *("FIOASYNC", "SIOCSPGRP", "FIOSETOWN", "TIOCSTI", "datagrams"),
    *("session", "group", "outlive", "memory file", "memory of others"),
}


@pytest.mark.usefixtures("confined")
def test_code_reaches_no_network_process_environment_or_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    (tmp_path / "secret").write_text("hf_secret")
    places = {name: str(tmp_path / name) for name in ("secret", "socket")}
    places |= {"folder": str(tmp_path), "trainer": os.getpid()}
    told = json.loads(run_program(PROBE % places, "", LIMITS).output or "")
    assert {name: told[name] for name in REFUSED} == dict.fromkeys(REFUSED, "PermissionError")
    assert told["thread"] == "RuntimeError"
    assert told["environment"] == "{}"
    assert told["large file"] == "OSError"
    assert told["own file"] == "(4, 'mine')"
    assert told["imports"] == "['math', 're', 'json', 'heapq', 'decimal', 'random']"
    assert "hf_secret" not in json.dumps(told)
    assert (tmp_path / "secret").read_text() == "hf_secret"


HOSTILE = {
    "an endless loop": "while True: pass",
    "an endless loop when it is called": "def add(a, b):\n    while True: pass",
    "sleep": "import time\ntime.sleep(1000)",
    "a loop in C": "import re\nre.match(r'(a+)+$', 'a' * 60 + 'b')",
    "a fork bomb": ("import os\nwhile True:\n    try: os.fork()\n    except BaseException: pass"),
    "closes its channel": "import os\nos.closerange(0, 64)\nwhile True: pass",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_does_not_end_is_killed_with_all_it_started(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    made = run_tests(HOSTILE[name], TESTS, CodeConfig(timeout_seconds=1.0, memory_mib=256))
    assert made.passed == [False, False]
    assert made.late or name == "closes its channel"  # whose tests end at once
    wait_until(lambda: not processes_in(tmp_path), "no process is left", 10)


def processes_in(folder: Path) -> list[int]:
    """Return the processes that work in `folder`, also where their parent has ended and it is removed."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.cwd().startswith(f"{folder}{os.sep}"):
                found.append(process.pid)
    return found


def test_memory_is_limited_in_the_code_and_in_what_it_sends() -> None:
    for code in ("held = [0] * 10**9", "def add(a, b): return [0] * 10**7"):
        assert scores(code, memory_mib=128) == [0.0]
        made = run_tests(code, TESTS, CodeConfig(timeout_seconds=20.0, memory_mib=128))
        assert (made.passed, made.late) == ([False, False], False)  # it was not the time that ended it


def test_much_output_is_cut_and_an_early_pass_is_kept_when_time_runs_out(
    lacking: tuple[str, ...],
) -> None:
    code = "import sys\nwhile True: sys.stdout.write('x' * 1000000)"
    assert run_program(code, "", LIMITS) == Judgement([], None, False, lacking)
    assert run_tests(f"print('x' * 10**8)\n{RIGHT}", TESTS, LIMITS).passed == [True, True]
    code = "def add(a, b):\n    while a < 0: pass\n    return a + b"
    made = run_tests(code, TESTS, CodeConfig(timeout_seconds=patient(0.25), memory_mib=256))
    assert made == Judgement([True, False], None, True, lacking)


LEFT = """
import os
for name in (b"\\xff\\n", b"-rf", b"x" * 255): open(name, "w").close()
os.mkdir("closed", 0)
os.mkfifo("fifo")
os.symlink(%r, "out")
for _ in range(1100):
    os.mkdir("deep")
    os.chdir("deep")
open("bottom", "w").close()
print(1)
"""


def test_its_folder_is_removed_whatever_is_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folders").mkdir()
    (tmp_path / "others").write_text("kept")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "folders"))
    assert run_program(LEFT % str(tmp_path), "", LIMITS).output == "1\n"
    assert list((tmp_path / "folders").iterdir()) == []
    assert (tmp_path / "others").read_text() == "kept"


STAYS = """
import ctypes, os, time
for leave in (os.setsid, lambda: os.setpgid(0, 0), lambda: ctypes.CDLL(None).prctl(1, 0, 0, 0, 0)):
    try: leave()
    except OSError: pass
open("ready", "w").close()
time.sleep(1000)
"""


@pytest.mark.usefixtures("confined")
def test_a_judge_that_dies_takes_the_code_with_it_and_the_completion_scores_0(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, logged: LoggedText
) -> None:
    reward = Code(CodeConfig(timeout_seconds=patient(60)))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    metrics: dict[str, float] = {}
    before = set(psutil.Process().children())
    with ThreadPoolExecutor(1) as pool:
        scored = pool.submit(reward, completions=[STAYS], tests=[TESTS], log_metric=metrics.__setitem__)
        wait_until(lambda: any(tmp_path.glob("*/ready")), "the code runs", 10)
        [judge] = {each for each in psutil.Process().children() if each not in before}
        [child] = judge.children()
        judge.kill()
        assert scored.result() == [0.0]
    assert metrics == {"code/timeouts": 0.0, "code/crashes": 1.0, "code/empty_tests": 0.0}
    assert "ended without a verdict" in logged()
    wait_until(lambda: not is_running(child.pid), "the code has ended", 10)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("confined")
def test_a_trainer_that_is_killed_leaves_no_process(tmp_path: Path) -> None:
    config = "CodeConfig(timeout_seconds=1000.0)"
    trainer = f"from grpox_rewards.code import *\nrun_tests({STAYS!r}, ['1'], {config})"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen([sys.executable, "-c", trainer], env=env) as process:
        wait_until(lambda: any(tmp_path.glob("*/ready")), "the code runs", 10)
        started = psutil.Process(process.pid).children(recursive=True)
        process.kill()
    assert len(started) == 2
    wait_until(lambda: not any(is_running(each.pid) for each in started), "all have ended", 10)


def test_where_the_kernel_denies_a_part_it_is_told_or_refused(
    monkeypatch: pytest.MonkeyPatch, logged: LoggedText
) -> None:
    without_network = Judgement([], lacking=("network",))
    monkeypatch.setattr("grpox_rewards.code.run_tests", lambda *_: without_network)
    Code(CodeConfig())
    assert "reward 'code' cannot keep the code from the network" in logged()
    with pytest.raises(ConfigError, match="the network, other processes and signals"):
        Code(CodeConfig(confinement="require"))
