"""vLLM servers, started as users start them: who may ask, what a second run and a lost server cost."""

import asyncio
import os
import signal
import threading

import aiohttp
import pytest
import torch
from support.listening import beyond_loopback, listening
from support.problems import problem_of
from support.sampling_parity import context_of, difference
from support.services import wait_until
from support.vllm_serving import MODEL, NEEDS_VLLM, TOKEN, borrowed
from transformers import AutoModelForCausalLM
from yarl import URL

from grpox.config import SamplingConfig
from grpox.contracts import Prompt
from grpox.errors import RunFailed
from grpox_generators.configs import LONGEST_WAIT, VllmServerConfig
from grpox_generators.vllm_server import VllmServerGenerator

pytestmark = NEEDS_VLLM


@pytest.fixture(scope="module")
def servers():
    """The session's two servers of the quickstart's model."""
    with borrowed(2) as both:
        yield both


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture
def started(policy):
    """Makes a generator that is asked for by the servers' addresses, with the policy's weights."""
    made = []

    def start(*servers, **settings):
        settings = {"start_timeout": LONGEST_WAIT, **settings}
        generator = VllmServerGenerator(VllmServerConfig(urls=[server.url for server in servers], **settings))
        generator.preflight(policy.config)
        generator.start(context_of(policy))
        synced(generator, policy, 1)
        made.append(generator)
        return generator

    yield start
    for generator in made:
        generator.close()


def synced(generator, policy, version):
    generator.sync(((name, p.detach().clone()) for name, p in policy.named_parameters()), version)


def requests(generator, count=8, groups=3):
    tokenizer = generator.context.tokenizer
    texts = [f"{37 + g}+48=" for g in range(groups)]
    return [Prompt(g, tuple(tokenizer(text)["input_ids"]), count) for g, text in enumerate(texts)]


def sampling(**settings):
    return SamplingConfig(**{"max_completion_length": 5, "temperature": 1.3, **settings})


def test_every_path_but_health_asks_for_the_token(servers):
    async def statuses(headers):
        found = {}
        async with aiohttp.ClientSession() as session:
            async with session.get(
                f"{servers[0].url}/openapi.json", headers={"Authorization": f"Bearer {TOKEN}"}
            ) as response:
                paths = (await response.json())["paths"]
            asked = [(method, path) for path, methods in paths.items() for method in methods]
            asked += [("options", "/collective_rpc"), ("post", "/health")]
            more = ("//health", "/docs", "/metrics", "/openapi.json", "/grpox/about", "/health/")
            asked += [("get", path) for path in more]
            for method, path in asked:
                url = URL(servers[0].url + path, encoded=True)
                async with session.request(method, url, headers=headers) as response:
                    found[method, path] = response.status
        return found

    for wrong in (None, "Bearer wrong", TOKEN, f"Bearer {TOKEN}x"):
        found = asyncio.run(statuses({} if wrong is None else {"Authorization": wrong}))
        assert len(found) > 40
        assert {("post", "/collective_rpc"), ("post", "/update_weights"), ("post", "/pause")} <= set(found)
        assert found.pop(("get", "/health")) == 200
        assert set(found.values()) == {401}


def test_a_server_listens_on_loopback_alone(servers):
    found = listening(servers[0].pid)
    assert "127.0.0.1" in found
    assert beyond_loopback(found) == set()


def test_a_wrong_token_and_another_model_are_refused_before_the_model_is_loaded(servers, policy, monkeypatch):
    other = type(policy.config)(**policy.config.to_dict() | {"hidden_size": 256, "num_hidden_layers": 3})
    asked = VllmServerGenerator(VllmServerConfig(urls=[servers[0].url]))
    problem = problem_of(asked.preflight, other)
    assert MODEL in problem.what
    assert "hidden_size is 128 there and 256 here, num_hidden_layers is 2 there and 3 here" in problem.what
    monkeypatch.setenv("GRPOX_SERVER_TOKEN", "another-token-of-the-tests")
    asked = VllmServerGenerator(VllmServerConfig(urls=[servers[0].url]))
    assert "refuses the token" in problem_of(asked.preflight, policy.config).what


def test_a_second_run_on_the_same_server_is_noticed(servers, started):
    first, _ = started(servers[0]), started(servers[0])
    with pytest.raises(RunFailed, match="another run has sent weights"):
        list(first.generate(requests(first), sampling(), 5))


def test_a_sync_that_was_broken_off_does_not_harm_the_next(servers, started, policy):
    def half():
        yield next((name, p.detach().clone()) for name, p in policy.named_parameters())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        started(servers[0]).sync(half(), 2)
    generator = started(servers[0])
    assert difference(policy, list(generator.generate(requests(generator), sampling(), 5)), 1.3) < 1e-5


def test_completions_come_as_they_end(servers, started):
    generator = started(servers[0])
    late = {"logit_bias": {generator.context.tokenizer.eos_token_id: -7.0}}
    ends = sampling(max_completion_length=50, temperature=2.0, generation_kwargs=late)
    many = list(generator.generate(requests(generator, 32, 1), ends, 5))
    lengths = [len(rollout.completion_ids) for rollout in many]
    assert len(set(lengths)) > 3
    # By and large: the server starts a few samples later than the rest.
    assert sum(lengths[:8]) < sum(lengths[-8:])


MORE_THAN_FIT = 16, 48
"""Samples and prompts of which each of two servers has some waiting when the first ones end."""


def begun(generator):
    """Ask for many long completions: the generator, from which the first one has arrived."""
    settings = sampling(min_completion_length=40, max_completion_length=41)
    arriving = generator.generate(requests(generator, *MORE_THAN_FIT), settings, 5)
    return [next(arriving)], arriving


def test_a_server_that_is_killed_leaves_its_requests_to_the_other(servers, started, policy, logged):
    generator = started(*servers, retries=0)
    wanted = [each for part in begun(generator) for each in part]
    first, arriving = begun(generator)
    servers[1].kill()
    assert_same([*first, *arriving], wanted)
    assert f"lost a server: {servers[1].url}" in logged()
    servers[1].start()
    servers[1].wait_until_ready()
    synced(generator, policy, 2)
    assert f"{servers[1].url} answers" in logged()
    rollouts = list(generator.generate(requests(generator), sampling(), 5))
    assert {rollout.policy_version for rollout in rollouts} == {2}


def test_the_only_server_is_killed_and_started_again(servers, started, logged):
    generator = started(servers[0], retries=1)
    wanted = [each for part in begun(generator) for each in part]
    rollouts, arriving = begun(generator)
    servers[0].kill()
    rest = threading.Thread(target=lambda: rollouts.extend(arriving))
    rest.start()
    heard = []

    def waits():
        heard.append(logged())
        return "waiting for a server" in "".join(heard)

    wait_until(waits, "the generator waits for a server")
    servers[0].start()
    rest.join()
    assert_same(rollouts, wanted)
    servers[0].wait_until_ready()


def test_no_process_of_a_server_outlives_grpox_serve(servers, started):
    _, arriving = begun(started(servers[0], retries=0))  # its requests are open
    everyone = servers[0].processes()
    assert len(everyone) > 1
    os.kill(servers[0].pid, signal.SIGKILL)
    servers[0]._wait_for(everyone)
    servers[0].start()
    servers[0].wait_until_ready()
    assert len(list(arriving)) == MORE_THAN_FIT[0] * MORE_THAN_FIT[1] - 1


def assert_same(rollouts, wanted):
    """Nothing lost, nothing twice, and the draws of an undisturbed generation."""
    drawn = [sorted((r.group_id, r.sample, r.completion_ids) for r in each) for each in (rollouts, wanted)]
    assert drawn[0] == drawn[1]
