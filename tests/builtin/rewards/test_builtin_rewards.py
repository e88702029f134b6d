"""The built-in rewards on cases decided by hand; math against the real math-verify in its killable process."""

import os
import signal
import subprocess
import sys
import threading
from contextlib import suppress

import psutil
import pytest
from pydantic import ValidationError
from support.patience import patient
from support.services import wait_until

from grpox_rewards import math as math_reward
from grpox_rewards.configs import ExactConfig, LengthConfig, MathConfig, RegexConfig
from grpox_rewards.math import Math
from grpox_rewards.text import Exact, Length, Regex


def test_exact_ignores_outer_space_only_and_abstains_without_an_answer():
    answers = ["85", "85", "85", None, 85]
    completions = [" 85\n", "8 5", "085", "85", "85"]
    assert Exact(ExactConfig())(completions=completions, answer=answers) == [1, 0, 0, None, 1]
    assert Exact(ExactConfig(strip=False))(completions=[" 85"], answer=["85"]) == [0]
    assert Exact(ExactConfig(column="gold", ignore_case=True))(completions=["Yes"], gold=["yES"]) == [1]


def test_exact_reads_the_content_of_a_conversational_completion():
    messages = [[{"role": "assistant", "content": "85"}]]
    assert Exact(ExactConfig())(completions=messages, answer=["85"]) == [1]


def test_regex_matches_a_part_or_the_whole():
    completions = ["<a>4</a>", "say <a>4</a>", "4"]
    assert Regex(RegexConfig(pattern="<a>.*</a>"))(completions=completions) == [1, 1, 0]
    whole = Regex(RegexConfig(pattern="<a>.*</a>", full=True, match=0.5, no_match=-1))
    assert whole(completions=completions) == [0.5, -1, -1]


def test_regex_compares_a_group_with_a_column():
    reward = Regex(RegexConfig(pattern=r"answer is (\d+)", column="answer"))
    completions = ["the answer is 12", "the answer is 13", "12", "the answer is 12"]
    assert reward(completions=completions, answer=["12", "12", "12", None]) == [1, 0, 0, None]


def test_a_bad_pattern_is_refused_with_its_position():
    with pytest.raises(ValidationError, match=r"not a regular expression: .* at position 1"):
        RegexConfig(pattern="a(b")


@pytest.mark.parametrize(("length", "expected"), [(10, 0), (5, -0.5), (15, -0.5), (20, -1), (99, -1)])
def test_length_falls_linearly_on_both_sides_of_the_target(length, expected):
    reward = Length(LengthConfig(target=10))
    assert reward(completions=["x"], completion_ids=[[1] * length]) == [expected]


@pytest.fixture(scope="module")
def judge():
    return Math(MathConfig())


@pytest.mark.parametrize(
    ("completion", "answer", "expected"),
    [
        ("no number at all", "11", 0),
        (r"\boxed{3}", r"The sum is \boxed{3}", 1),
        ("7", None, None),
        ("7", "apples", None),
        ("7", float("nan"), None),
        ("0.5", "numpy", 1),
        (r"\boxed{2}", "(1, 2)", 0),
    ],
)
def test_math_compares_values(judge, completion, answer, expected):
    if answer == "numpy":
        import numpy as np

        answer = np.float64(0.5)
    assert judge(completions=[completion], answer=[answer]) == [expected]


def test_math_kills_what_takes_too_long_and_judges_the_next(judge):
    """A tower of powers that no computer can work out; then an ordinary answer."""
    logged = {}
    reward = Math(MathConfig(timeout_seconds=patient(0.375)))
    reward(completions=["1"], answer=["1"])  # the process is up: what follows takes the time limit alone
    hostile = r"\boxed{9^{9^{9^{9^{9}}}} + 1}"
    scores = reward(completions=[hostile, "5"], answer=["4", "5"], log_metric=logged.__setitem__)
    assert scores == [0, 1]
    assert logged == {"math/timeouts": 0.5, "math/crashes": 0, "math/unreadable_answers": 0}


def test_math_survives_a_huge_completion(judge):
    assert judge(completions=["9" * 1_000_000, "6"], answer=["4", "6"]) == [0, 1]


def test_math_judges_in_a_thread_where_no_alarm_can_be_set(judge):
    scores = []
    thread = threading.Thread(target=lambda: scores.extend(judge(completions=["5"], answer=["5"])))
    thread.start()
    thread.join()
    assert scores == [1]


def test_math_refuses_an_answer_that_is_no_number(judge):
    with pytest.raises(TypeError, match="not bool: True"):
        judge(completions=["1"], answer=[True])


def test_math_tells_why_its_process_does_not_start(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text("raise ImportError('no math-verify here')\n")
    monkeypatch.setattr(math_reward, "WORKER", worker)
    with pytest.raises(RuntimeError, match="no math-verify here"):
        Math(MathConfig())(completions=["1"], answer=["1"])


def test_a_process_that_dies_scores_nothing_right_and_the_next_completion_has_another(tmp_path, monkeypatch):
    worker = tmp_path / "worker.py"
    worker.write_text(
        "import json, os\nfrom grpox.runtime.child import connect_to_parent\n"
        "parent = connect_to_parent()\nparent.send_bytes(b'ready')\n"
        "while True:\n"
        "    if json.loads(parent.recv_bytes())['completion'] == 'crash': os._exit(1)\n"
        "    parent.send_bytes(b'right')\n"
    )
    monkeypatch.setattr(math_reward, "WORKER", worker)
    logged = {}
    reward = Math(MathConfig())
    scores = reward(completions=["a", "crash", "b"], answer=["1"] * 3, log_metric=logged.__setitem__)
    assert scores == [1, 0, 1]
    assert logged["math/crashes"] == pytest.approx(1 / 3)


def test_a_process_at_work_does_not_outlive_a_parent_that_is_killed():
    script = (
        "from grpox_rewards.configs import MathConfig\n"
        "from grpox_rewards.math import Math\n"
        f"reward = Math(MathConfig(timeout_seconds={patient(0.5)}))\n"
        "reward._child.get()\n"
        "print(reward._child.current.pid, flush=True)\n"
        r"reward(completions=['\\boxed{9^{9^{9^{9^{9}}}} + 1}'], answer=['4'])"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    worker = psutil.Process(int(parent.stdout.readline()))
    try:
        begun = worker.cpu_times().user
        wait_until(
            lambda: worker.cpu_times().user > begun + 0.1, "the second judgement is under way", 60, parent
        )
        os.kill(parent.pid, signal.SIGKILL)
        parent.communicate()
        wait_until(lambda: has_ended(worker), "the process has ended", 20)
    finally:
        parent.kill()
        parent.wait()
        with suppress(psutil.NoSuchProcess):
            worker.kill()


def has_ended(process):
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
