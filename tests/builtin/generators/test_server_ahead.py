"""`begin` of vllm-server, with servers that a test opens and shuts: what goes on while nobody reads."""

import asyncio
import gc
import threading
from types import SimpleNamespace

import pytest
from support.patience import patient

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import ConfigError, Problem
from grpox_generators import server_pool
from grpox_generators.configs import VllmServerConfig
from grpox_generators.server_client import Completion, ServerLost
from grpox_generators.server_fleet import LoopThread
from grpox_generators.vllm_server import VllmServerGenerator

PROMPTS = [Prompt(group, (group + 1,), 2) for group in range(3)]
URL = "http://127.0.0.1:8000"


class Client:
    """Answers when its gate is open; `error` in place of the second group."""

    url, heard = URL, 0.0

    def __init__(self):
        self.version = "run/3"
        self.error = None
        self.gate = threading.Event()
        self.answered = threading.Semaphore(0)
        self.cancelled = threading.Event()

    async def watch(self, version):
        await asyncio.Event().wait()

    async def complete(self, token_ids, params):
        try:
            while not self.gate.is_set():
                await asyncio.sleep(0.002)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error is not None and token_ids[0] == 2:
            raise self.error
        for sample in range(2):
            yield Completion(sample, [token_ids[0], sample], [-0.5, -0.5], "stop", (self.version,))
        self.answered.release()

    async def close(self): ...


class Fleet:
    def __init__(self, client):
        self.client = client
        self.clients = {URL: client}
        self.loop = LoopThread()
        self.calls = []

    def look(self):
        about = {"weight_version": self.client.version, "max_num_seqs": 8, "max_model_len": 64}
        return {URL: about}

    def readmit(self):
        self.calls.append("readmit")

    def give_up(self, url, why):
        self.calls.append(f"give up: {why}")

    def close(self):
        """As the real one, but for the loop, which the fixture ends."""
        self.loop.run(self.client.close())


@pytest.fixture
def made(monkeypatch):
    """A generator whose weights are version 3, and its only server."""
    monkeypatch.setattr(server_pool, "FIRST_BACK_OFF", 0.0)
    client = Client()
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


def begun(generator):
    return generator.begin(PROMPTS, SamplingConfig(max_completion_length=4), 5)


def places(rollouts):
    return sorted((rollout.group_id, rollout.sample) for rollout in rollouts)


ALL = [(group, sample) for group in range(3) for sample in range(2)]


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
    assert client.answered._value == 3
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
    assert generator._fleet.calls == ["give up: it went away", "readmit", "send"]
    rollouts = list(arriving)
    assert set(places(rollouts)) == {(0, 0), (0, 1), (2, 0), (2, 1)}
    assert generator._fleet.calls == ["give up: it went away", "readmit", "send"]


def test_without_a_server_nothing_is_begun(made):
    generator, client = made
    client.version = "another/1"
    assert list(begun(generator)) == []


def test_what_a_server_refuses_is_told_when_it_is_read(made):
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
