"""Distribution of requests over vLLM servers, also after the loss of a server."""

import asyncio

import pytest
from support.patience import patient

from grpox.contracts import Prompt
from grpox.errors import ConfigError, Problem
from grpox_generators import server_pool
from grpox_generators.server_client import Completion, ServerLost
from grpox_generators.server_pool import Member, Request, ServerPool

VERSION = "run/3"


class Client:
    """A server whose answers a test writes: a list per request of completions and errors, or "all"."""

    def __init__(self, url, *answers, last="all", pace=None, silence=None):
        self.url, self.heard = url, 0.0
        self.silence = silence
        self.answers = list(answers)
        self.last = last
        self.pace = pace
        self.asked = []

    async def watch(self, version):
        if self.silence is None:
            await asyncio.Event().wait()
        await self.silence()

    async def complete(self, token_ids, params):
        self.asked.append(token_ids[0])
        answer = self.answers.pop(0) if self.answers else self.last
        if self.pace is not None:
            await self.pace()
        for item in [done(i) for i in range(2)] if answer == "all" else answer:
            if isinstance(item, Exception):
                raise item
            yield item


def done(index, version=VERSION, reason="stop"):
    return Completion(index, [7], [-0.5], reason, (version,))


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch):
    monkeypatch.setattr(server_pool, "FIRST_BACK_OFF", 0.0)


def complete(clients, count=4, room=2, retries=1):
    """Deal `count` groups of two; the samples that were handed on, the pool, the requests."""
    requests = [Request(Prompt(g, (g,), 2), {}) for g in range(count)]
    taken = []
    pool = ServerPool([Member(client, room) for client in clients], VERSION, retries)
    work = pool.run(requests, lambda request, done: taken.append((request.prompt.group_id, done.index)))
    asyncio.run(work)
    return sorted(taken), pool, requests


ALL = [(group, sample) for group in range(4) for sample in range(2)]


def test_every_sample_is_handed_on_once():
    a, b = Client("a"), Client("b")
    taken, _, requests = complete([a, b])
    assert taken == ALL
    assert sorted(a.asked + b.asked) == [0, 1, 2, 3]
    assert not any(request.missing for request in requests)


def test_prompts_go_where_there_is_least_to_do():
    async def until_the_other_has_had_five():
        async with asyncio.timeout(patient(10)):
            while len(quick.asked) < 5:
                await asyncio.sleep(0)

    slow, quick = Client("slow", pace=until_the_other_has_had_five), Client("quick")
    complete([slow, quick], count=8)
    assert len(quick.asked) > len(slow.asked) >= 1
    even = [Client("a"), Client("b")]
    complete(even, count=8, room=100)
    assert [len(client.asked) for client in even] == [4, 4]


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
    taken, pool, _ = complete([client], count=1)
    assert taken == [(0, 0), (0, 1)]
    assert client.asked == [0, 0]
    assert pool.lost == {}


def test_a_lost_servers_requests_go_to_the_others():
    dead = Client("dead", last=[ServerLost("dead: refused")])
    taken, pool, _ = complete([dead, Client("b")], retries=0)
    assert taken == ALL
    assert pool.lost == {"dead": "dead: refused"}


def test_a_server_that_falls_silent_leaves_its_requests_to_the_others():
    asked = asyncio.Event()

    async def say_nothing():
        asked.set()
        await asyncio.Event().wait()

    async def fail_once_asked():
        await asked.wait()
        raise ServerLost("silent has weights default")

    silent, other = Client("silent", pace=say_nothing, silence=fail_once_asked), Client("b")
    taken, pool, _ = complete([silent, other])
    assert taken == ALL
    assert pool.lost == {"silent": "silent has weights default"}


def test_without_servers_the_rest_stays_missing():
    client = Client("a", "all", last=[done(0), ServerLost("gone")])
    taken, pool, requests = complete([client], retries=2)
    assert (0, 0) in taken
    assert (0, 1) in taken
    assert sum(request.missing for request in requests) == len(ALL) - len(taken) > 0
    assert pool.lost == {"a": "gone"}


def test_other_weights_are_refused_at_once():
    client = Client("a", last=[done(0, version="default")])
    taken, pool, _ = complete([client], count=1, retries=5)
    assert taken == []
    assert client.asked == [0]
    assert pool.lost == {"a": "a sampled with weights default instead of run/3"}


def test_weights_that_changed_under_way_are_refused():
    mixed = Completion(0, [7, 8], [-0.5, -0.5], "stop", (VERSION, "run/4"))
    taken, pool, _ = complete([Client("a", last=[mixed])], count=1)
    assert taken == []
    assert "run/3, run/4" in pool.lost["a"]


@pytest.mark.parametrize("reason", ["abort", "error"])
def test_a_completion_that_was_broken_off_is_none(reason):
    taken, _, _ = complete([Client("a", [done(0, reason=reason)])], count=1)
    assert taken == [(0, 0), (0, 1)]
    taken, pool, _ = complete([Client("a", last=[done(0, reason=reason)])], count=1)
    assert taken == []
    assert reason in pool.lost["a"]


def test_a_request_that_is_refused_ends_all():
    wrong = ConfigError(Problem("vLLM does not accept these settings", "sampling"))
    with pytest.raises(ConfigError):
        complete([Client("a", last=[wrong]), Client("b")])
