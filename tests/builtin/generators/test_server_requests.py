"""Requests to servers that a test writes: their distribution, the loss of a server, and what is begun ahead."""

import asyncio
import gc
import threading
from types import SimpleNamespace

import pytest
from support.patience import patient

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import ConfigError, Problem, RunFailed
from grpox_generators import vllm_server
from grpox_generators.configs import VllmServerConfig
from grpox_generators.server_client import LoopThread, ServedCompletion, ServerLost
from grpox_generators.vllm_server import Member, PendingRequests, PromptRequest, VllmServerGenerator

VERSION = "run/3"
URL = "http://127.0.0.1:8000"


class Client:
    """A server whose answers a test writes: a list per request of completions and errors, or "all"."""

    def __init__(self, url, *answers, last="all", pace=None, silence=None):
        self.url, self.heard = url, 0.0
        self.silence = silence
        self.answers = list(answers)
        self.last = last
        self.pace = pace
        self.asked = []
        self.version = VERSION

    async def watch(self, version):
        if self.silence is None:
            await asyncio.Event().wait()
        await self.silence()

    async def complete(self, token_ids, params):
        self.asked.append(token_ids[0])
        answer = self.answers.pop(0) if self.answers else self.last
        if self.pace is not None:
            await self.pace()
        for item in [done(i, version=self.version) for i in range(2)] if answer == "all" else answer:
            if isinstance(item, Exception):
                raise item
            yield item

    async def close(self): ...


def done(index, version=VERSION, reason="stop"):
    return ServedCompletion(index, [7], [-0.5], reason, (version,))


class Fleet:
    """One server for the generator; `calls` is what was done with it."""

    def __init__(self, client=None, retries=0):
        self.config = VllmServerConfig(retries=retries)
        self.client, self.clients = client, {URL: client}
        self.loop = LoopThread()
        self.calls, self.lost = [], {}

    def look(self):
        return {URL: {"weight_version": self.client.version, "max_num_seqs": 8, "max_model_len": 64}}

    def readmit(self):
        self.calls.append("readmit")

    def give_up(self, url, why):
        self.lost[url] = why
        self.calls.append(f"give up: {why}")

    def close(self):
        """As the real one, but for the loop, which the fixture ends."""
        self.loop.run(self.client.close())


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(vllm_server, "FIRST_BACK_OFF", 0.0)


def complete(clients, count=4, room=2, retries=1):
    """Deal `count` groups of two; the samples that were handed on, the lost servers, the requests."""
    requests = [PromptRequest(Prompt(g, (g,), 2), {}) for g in range(count)]
    fleet = Fleet(retries=retries)
    try:
        members = [Member(client, room) for client in clients]
        arriving = PendingRequests(fleet, members, requests, VERSION, 3).arriving()
        taken = sorted((request.prompt.group_id, done.index) for request, done in arriving)
    finally:
        fleet.loop.close()
    return taken, fleet.lost, requests


ALL = [(group, sample) for group in range(4) for sample in range(2)]


def test_prompts_go_where_there_is_least_to_do():
    async def until_the_other_has_had_five():
        async with asyncio.timeout(patient(10)):
            while len(quick.asked) < 5:
                await asyncio.sleep(0)

    slow, quick = Client("slow", pace=until_the_other_has_had_five), Client("quick")
    complete([slow, quick], count=8)
    assert len(quick.asked) > len(slow.asked) >= 1
    even = [Client("a"), Client("b")]
    taken, _, requests = complete(even, count=8, room=100)
    assert [len(client.asked) for client in even] == [4, 4]
    assert sorted(even[0].asked + even[1].asked) == list(range(8))
    assert taken == [(group, sample) for group in range(8) for sample in range(2)]
    assert not any(request.missing for request in requests)


def test_no_more_is_asked_for_than_there_is_room():
    open_now, most = 0, 0

    async def count():
        nonlocal open_now, most
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.001)
        open_now -= 1

    complete([Client("a", pace=count)], count=9, room=5)
    assert most == 3  # the third group of two is let in while one place is free


def test_a_failed_request_is_repeated_and_its_samples_count_once():
    client = Client("a", [done(1), ServerLost("broken")])
    taken, lost, _ = complete([client], count=1)
    assert (taken, client.asked, lost) == ([(0, 0), (0, 1)], [0, 0], {})


def test_a_server_that_is_lost_or_falls_silent_leaves_its_requests_to_the_others():
    dead = Client("dead", last=[ServerLost("dead: refused")])
    assert complete([dead, Client("b")], retries=0)[:2] == (ALL, {"dead": "dead: refused"})
    asked = asyncio.Event()

    async def say_nothing():
        asked.set()
        await asyncio.Event().wait()

    async def fail_once_asked():
        await asked.wait()
        raise ServerLost("silent has weights default")

    silent = Client("silent", pace=say_nothing, silence=fail_once_asked)
    assert complete([silent, Client("b")])[:2] == (ALL, {"silent": "silent has weights default"})


def test_without_servers_the_rest_stays_missing():
    client = Client("a", "all", last=[done(0), ServerLost("gone")])
    taken, lost, requests = complete([client], retries=2)
    assert {(0, 0), (0, 1)} <= {*taken}
    assert sum(request.missing for request in requests) == len(ALL) - len(taken) > 0
    assert lost == {"a": "gone"}


@pytest.mark.parametrize(
    ("versions", "why"),
    [
        (("default",), "a sampled with weights default instead of run/3"),
        ((VERSION, "run/4"), "a sampled with weights run/3, run/4 instead of run/3"),
        ((), "a sampled with weights unknown instead of run/3"),
    ],
)
def test_other_weights_are_refused_at_once(versions, why):
    client = Client("a", last=[ServedCompletion(0, [7, 8], [-0.5, -0.5], "stop", versions)])
    assert complete([client], count=1, retries=5)[:2] == ([], {"a": why})
    assert client.asked == [0]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_completion_that_was_broken_off_is_none(reason):
    broken = done(0, reason=reason)
    assert complete([Client("a", [broken])], count=1)[0] == [(0, 0), (0, 1)]
    taken, lost, _ = complete([Client("a", last=[broken])], count=1)
    assert (taken, lost) == ([], {"a": f"a broke off a completion: {reason}"})


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (ConfigError(Problem("vLLM does not accept these settings", "sampling")), ConfigError),
        (ServedCompletion(0, [7, 8], [-0.5], "stop", (VERSION,)), RunFailed),
    ],
    ids=["refused", "without log-probabilities"],
)
def test_a_request_that_is_refused_ends_all(answer, error):
    with pytest.raises(error):
        complete([Client("a", last=[answer]), Client("b")])


class Gated(Client):
    """Answers when its gate is open; `error` in place of the second group."""

    def __init__(self):
        super().__init__(URL)
        self.error = None
        self.gate = threading.Event()
        self.answered = threading.Semaphore(0)
        self.cancelled = threading.Event()

    async def complete(self, token_ids, params):
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error is not None and token_ids[0] == 1:
            raise self.error
        async for completion in super().complete(token_ids, params):
            yield completion
        self.answered.release()


@pytest.fixture
def made(monkeypatch):
    """A generator whose weights are version 3, and its only server."""
    client = Gated()
    generator = VllmServerGenerator(VllmServerConfig(urls=[URL], retries=0))
    generator.context = SimpleNamespace(rank=0, world_size=1, stop_token_ids=(0,))
    generator._run, generator._vocabulary, generator.version = "run", 17, 3
    generator._fleet = Fleet(client)

    def send(weights):
        generator._fleet.calls.append("send")
        client.version = generator._tag

    monkeypatch.setattr(generator, "_send", send)
    yield generator, client
    generator._fleet.loop.close()


PROMPTS = [Prompt(group, (group,), 2) for group in range(4)]


def begun(generator):
    return generator.begin(PROMPTS, SamplingConfig(max_completion_length=4), 5)


def places(rollouts):
    return sorted((rollout.group_id, rollout.sample) for rollout in rollouts)


def test_servers_are_at_work_while_nobody_reads(made):
    generator, client = made
    arriving = begun(generator)
    client.gate.set()
    assert all(client.answered.acquire(timeout=patient(5)) for _ in PROMPTS)
    rollouts = list(arriving)
    assert places(rollouts) == ALL
    assert {rollout.policy_version for rollout in rollouts} == {3}


def test_new_weights_wait_for_what_was_begun(made):
    generator, client = made
    arriving = begun(generator)
    threading.Timer(0.1, client.gate.set).start()
    generator.sync(iter(()), 4)
    assert client.answered._value == len(PROMPTS)
    assert generator._fleet.calls == ["readmit", "send"]
    later = list(generator.generate(PROMPTS, SamplingConfig(max_completion_length=4), 5))
    rollouts = list(arriving)
    assert places(rollouts) == places(later) == ALL
    assert {rollout.policy_version for rollout in rollouts} == {3}
    assert {rollout.policy_version for rollout in later} == {4}


def test_samples_of_a_server_that_is_lost_are_left_out(made):
    """It is given up before new weights are sent, and not again after it came back for them."""
    generator, client = made
    client.error = ServerLost("it went away")
    client.gate.set()
    arriving = begun(generator)
    generator.sync(iter(()), 4)
    once = ["give up: it went away", "readmit", "send"]
    assert generator._fleet.calls == once
    assert places(arriving) == [place for place in ALL if place[0] != 1]
    assert generator._fleet.calls == once
    client.version = "another/1"  # without a server nothing is begun
    assert list(begun(generator)) == []


def test_a_refusal_of_a_server_is_raised_when_its_answer_is_read(made):
    generator, client = made
    client.error = ConfigError(Problem("it does not take that"))
    client.gate.set()
    arriving = begun(generator)
    generator.sync(iter(()), 4)
    with pytest.raises(ConfigError, match="does not take that"):
        list(arriving)


def test_an_end_of_the_run_waits_for_nothing(made, capfd):
    generator, client = made
    arriving = begun(generator)
    generator.close()
    assert client.cancelled.wait(5)
    del arriving
    gc.collect()
    assert capfd.readouterr().err == ""
