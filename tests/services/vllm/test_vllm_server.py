"""vLLM servers, started as users start them: weights in sync, who may ask, what a lost server costs."""

import asyncio
import json
import os
import signal
import threading
import time
from importlib import util
from itertools import pairwise
from pathlib import Path

import aiohttp
import pytest
import torch
from support.generator_line import assert_learned, run_file
from support.listening import beyond_loopback, listening
from support.own_lengths import assert_cut
from support.sampling_parity import SETTINGS, difference, largest_difference
from support.services import wait_until
from support.vllm_serving import MODEL, TOKEN, Served, borrowed
from transformers import AutoModelForCausalLM, AutoTokenizer
from yarl import URL

from grpox.config import SamplingConfig
from grpox.contracts import GeneratorContext, Prompt
from grpox.errors import ConfigError, RunFailed
from grpox.policy.batch import collate, samples_of
from grpox.policy.logprobs import completion_logprobs
from grpox.policy.models import architecture_of
from grpox_generators.configs import LONGEST_WAIT, VllmServerConfig
from grpox_generators.vllm_server import VllmServerGenerator

pytestmark = [
    pytest.mark.skipif(util.find_spec("vllm") is None, reason="vLLM is not installed (make vllm)"),
]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def servers():
    """The session's two servers of the quickstart's model."""
    with borrowed(2) as both:
        yield both


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(MODEL)


@pytest.fixture(scope="module")
def policy():
    return AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)


@pytest.fixture
def started(policy, tokenizer):
    """Makes a generator that is asked for by the servers' addresses."""
    made = []

    def start(*servers, **settings):
        settings = {"start_timeout": LONGEST_WAIT, **settings}
        config = VllmServerConfig(urls=[server.url for server in servers], **settings)
        generator = VllmServerGenerator(config)
        generator.preflight(policy.config)
        ends = (tokenizer.eos_token_id,)
        build = architecture_of(policy)
        generator.start(GeneratorContext(Path(MODEL), build, tokenizer, ends, CPU, 0, 1, 0, policy))
        made.append(generator)
        return generator

    yield start
    for generator in made:
        generator.close()


def synced(generator, policy, version):
    generator.sync(((name, p.detach().clone()) for name, p in policy.named_parameters()), version)


def requests(tokenizer, count=8, groups=3):
    texts = [f"{37 + g}+48=" for g in range(groups)]
    return [Prompt(g, tuple(tokenizer(text)["input_ids"]), count) for g, text in enumerate(texts)]


def sampling(**settings):
    return SamplingConfig(**{"max_completion_length": 5, "temperature": 1.3, **settings})


def in_order(rollouts):
    return sorted(rollouts, key=lambda rollout: (rollout.group_id, rollout.sample))


def test_log_probabilities_are_the_policys_after_every_sync(servers, started, policy, tokenizer):
    generator = started(*servers)
    draw = torch.Generator().manual_seed(0)
    for version in range(1, 6):
        with torch.no_grad():
            for parameter in policy.parameters():
                parameter += 0.01 * torch.randn(parameter.shape, generator=draw)
        synced(generator, policy, version)
        rollouts = list(generator.generate(requests(tokenizer), sampling(), 5))
        assert {rollout.policy_version for rollout in rollouts} == {version}
        assert difference(policy, rollouts, 1.3) < 1e-5


def test_a_seed_repeats_its_draws_whichever_server_makes_them(servers, started, policy, tokenizer):
    generator, alone = started(*servers), started(servers[0])
    synced(generator, policy, 1)
    both = in_order(generator.generate(requests(tokenizer), sampling(), 5))
    assert in_order(generator.generate(requests(tokenizer), sampling(), 6)) != both
    synced(alone, policy, 1)
    one = in_order(alone.generate(requests(tokenizer), sampling(), 5))
    assert [r.completion_ids for r in one] == [r.completion_ids for r in both]


def test_log_probabilities_are_those_of_the_distribution_that_was_asked_for(
    servers, started, policy, tokenizer
):
    generator = started(servers[0])
    synced(generator, policy, 1)
    for settings in SETTINGS:
        rollouts = list(generator.generate(requests(tokenizer), sampling(**settings), 5))
        assert len(rollouts) == 24
        ends = (tokenizer.eos_token_id,)
        assert largest_difference(policy, rollouts, sampling(**settings), ends) < 1e-4, settings


def test_what_ends_a_completion(servers, started, policy, tokenizer):
    generator = started(servers[0])
    synced(generator, policy, 1)

    def texts(**settings):
        rollouts = generator.generate(requests(tokenizer), sampling(**settings), 5)
        return [(r, tokenizer.decode(r.completion_ids, skip_special_tokens=True)) for r in rollouts]

    for rollout, _ in texts(max_completion_length=3):
        ended = rollout.completion_ids[-1] == tokenizer.eos_token_id
        assert rollout.finish_reason == ("stop" if ended else "length")
        assert ended or len(rollout.completion_ids) == 3
    assert all(len(rollout.completion_ids) == 5 for rollout, _ in texts(min_completion_length=4))
    assert all("5" not in text[:-1] for _, text in texts(stop=["5"]))
    pattern = {"structured_outputs": {"regex": "[0-9]{2}"}}
    two_digits = texts(temperature=2.0, generation_kwargs=pattern)
    assert all(text.isdecimal() and len(text) == 2 for _, text in two_digits)


def test_a_prompt_has_its_own_longest_completion(servers, started, policy, tokenizer):
    generator = started(*servers)
    synced(generator, policy, 1)
    assert_cut(generator, requests(tokenizer, groups=4))


def test_settings_that_vllm_does_not_take_are_told(servers, started, policy, tokenizer):
    generator = started(*servers)
    synced(generator, policy, 1)
    with pytest.raises(ConfigError, match="vLLM does not accept these settings"):
        list(generator.generate(requests(tokenizer), sampling(generation_kwargs={"allowed_token_ids": []}), 5))
    with pytest.raises(RunFailed, match="exceed the 64 positions"):
        list(generator.generate(requests(tokenizer), sampling(max_completion_length=60), 5))


def test_it_conforms(servers, grpox):
    done = grpox("plugins", "check", "vllm-server", f"urls=[{servers[0].url}]")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "11 passed" in done.stdout


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


def test_a_wrong_token_is_told_before_the_model_is_loaded(servers, policy, monkeypatch):
    monkeypatch.setenv("GRPOX_SERVER_TOKEN", "another-token-of-the-tests")
    with pytest.raises(ConfigError, match="refuses the token"):
        VllmServerGenerator(VllmServerConfig(urls=[servers[0].url])).preflight(policy.config)


def test_a_server_of_another_model_is_refused_by_name(servers, policy):
    other = type(policy.config)(**policy.config.to_dict() | {"hidden_size": 256, "num_hidden_layers": 3})
    with pytest.raises(ConfigError) as caught:
        VllmServerGenerator(VllmServerConfig(urls=[servers[0].url])).preflight(other)
    (problem,) = caught.value.problems
    assert MODEL in problem.what
    assert "hidden_size is 128 there and 256 here, num_hidden_layers is 2 there and 3 here" in problem.what


def test_a_second_run_on_the_same_server_is_noticed(servers, started, policy, tokenizer):
    first, second = started(servers[0]), started(servers[0])
    synced(first, policy, 1)
    synced(second, policy, 1)
    with pytest.raises(RunFailed, match="another run has sent weights"):
        list(first.generate(requests(tokenizer), sampling(), 5))


def test_a_sync_that_was_broken_off_does_not_harm_the_next(servers, started, policy, tokenizer):
    broken, generator = started(servers[0]), started(servers[0])

    def half():
        yield next((name, p.detach().clone()) for name, p in policy.named_parameters())
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken.sync(half(), 1)
    synced(generator, policy, 1)
    rollouts = list(generator.generate(requests(tokenizer), sampling(), 5))
    assert difference(policy, rollouts, 1.3) < 1e-5


def test_completions_come_as_they_end(servers, started, policy, tokenizer):
    generator = started(servers[0])
    synced(generator, policy, 1)
    late = {"logit_bias": {tokenizer.eos_token_id: -7.0}}
    ends = sampling(max_completion_length=50, temperature=2.0, generation_kwargs=late)
    many = list(generator.generate(requests(tokenizer, 32, 1), ends, 5))
    lengths = [len(rollout.completion_ids) for rollout in many]
    assert len(set(lengths)) > 3
    # By and large: the server starts a few samples later than the rest.
    assert sum(lengths[:8]) < sum(lengths[-8:])


def test_smollm2_agrees_after_every_sync(smollm2, monkeypatch):
    """Log-probabilities of a real model, tied embeddings and several buckets included, to 2e-4 nats."""
    monkeypatch.setenv("GRPOX_SERVER_TOKEN", TOKEN)
    server = Served(str(smollm2), "--max-model-len", "256", "--kv-cache-gib", "0.5")
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    generator = VllmServerGenerator(VllmServerConfig(urls=[server.url], bucket_mib=128))
    try:
        server.wait_until_ready()
        ends = (tokenizer.eos_token_id,)
        build = architecture_of(model)
        generator.start(GeneratorContext(smollm2, build, tokenizer, ends, CPU, 0, 1, 0, model))
        draw = torch.Generator().manual_seed(0)
        for version in range(1, 4):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter *= 1 + 0.01 * torch.randn(parameter.shape, generator=draw)
            synced(generator, model, version)
            ids = tuple(tokenizer("The capital of France is")["input_ids"])
            rollouts = list(generator.generate([Prompt(0, ids, 8)], sampling(max_completion_length=16), 5))
            batch = collate(samples_of(rollouts, [0.0] * len(rollouts)), CPU)
            logprobs, _ = completion_logprobs(model, batch, 1.3)
            mask = batch.token_mask
            torch.testing.assert_close(logprobs[mask], batch.sampler_logprobs[mask], atol=2e-4, rtol=0)
        generator.close()
    finally:
        server.stop()


def test_no_server_is_told_with_what_to_do(policy, monkeypatch):
    monkeypatch.setenv("GRPOX_SERVER_TOKEN", TOKEN)
    config = VllmServerConfig(urls=["http://127.0.0.1:9"], start_timeout=0)
    with pytest.raises(ConfigError) as caught:
        VllmServerGenerator(config).preflight(policy.config)
    (problem,) = caught.value.problems
    assert problem.key == "generator.urls"
    assert "no vLLM server answers: http://127.0.0.1:9" in problem.what
    assert "grpox serve" in problem.allowed


def test_a_server_that_is_being_started_does_not_hold_up_the_model(policy, logged, monkeypatch):
    monkeypatch.setenv("GRPOX_SERVER_TOKEN", TOKEN)
    config = VllmServerConfig(urls=["http://127.0.0.1:9"], start_timeout=60)
    VllmServerGenerator(config).preflight(policy.config)
    assert "no server answers yet; loading the model meanwhile: http://127.0.0.1:9" in logged()


@pytest.mark.parametrize("generator", ["hf", "vllm-server"])
def test_the_generator_is_one_line_of_the_run_file(servers, grpox, folder, generator):
    urls = json.dumps([server.url for server in servers])
    line = generator if generator == "hf" else f"{{name: {generator}, urls: {urls}}}"
    (folder / "run.yaml").write_text(run_file(line, f"runs/{generator}"), encoding="utf-8")
    done = grpox("train", "run.yaml")
    assert done.returncode == 0, done.stderr[-3000:]
    assert_learned(folder / "runs" / generator, "none" if generator == "hf" else "token-truncate")


# From here on servers are killed and started again.
MORE_THAN_FIT = 16, 48
"""Samples and prompts of which each of two servers has some waiting when the first ones end."""


def test_a_server_that_is_killed_leaves_its_requests_to_the_other(servers, started, policy, tokenizer, logged):
    generator = started(*servers, retries=0)
    synced(generator, policy, 1)
    settings = sampling(min_completion_length=40, max_completion_length=41)
    wanted = in_order(generator.generate(requests(tokenizer, *MORE_THAN_FIT), settings, 5))
    arriving = generator.generate(requests(tokenizer, *MORE_THAN_FIT), settings, 5)
    first = next(arriving)
    servers[1].kill()
    assert_same(in_order([first, *arriving]), wanted)
    assert f"lost a server: {servers[1].url}" in logged()
    servers[1].start()
    servers[1].wait_until_ready()
    synced(generator, policy, 2)
    assert f"{servers[1].url} answers" in logged()
    rollouts = list(generator.generate(requests(tokenizer), sampling(), 5))
    assert {rollout.policy_version for rollout in rollouts} == {2}


def test_the_only_server_is_killed_and_started_again(servers, started, policy, tokenizer, logged):
    generator = started(servers[0], retries=1)
    synced(generator, policy, 1)
    settings = sampling(min_completion_length=40, max_completion_length=41)
    wanted = in_order(generator.generate(requests(tokenizer, *MORE_THAN_FIT), settings, 5))
    arriving = generator.generate(requests(tokenizer, *MORE_THAN_FIT), settings, 5)
    rollouts = [next(arriving)]
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
    assert_same(in_order(rollouts), wanted)
    servers[0].wait_until_ready()


def test_no_process_of_a_server_outlives_grpox_serve(servers, started, policy, tokenizer):
    generator = started(servers[0], retries=0)
    synced(generator, policy, 1)
    settings = sampling(min_completion_length=40, max_completion_length=41)
    arriving = generator.generate(requests(tokenizer, *MORE_THAN_FIT), settings, 5)
    next(arriving)  # its requests are open
    everyone = servers[0].processes()
    assert len(everyone) > 1
    os.kill(servers[0].pid, signal.SIGKILL)
    servers[0]._wait_for(everyone)
    servers[0].start()
    servers[0].wait_until_ready()
    assert len(list(arriving)) == MORE_THAN_FIT[0] * MORE_THAN_FIT[1] - 1


def assert_same(rollouts, wanted):
    """Nothing lost, nothing twice, and the draws of an undisturbed generation."""
    assert [(r.group_id, r.sample) for r in rollouts] == [(r.group_id, r.sample) for r in wanted]
    assert [r.completion_ids for r in rollouts] == [r.completion_ids for r in wanted]


def test_a_server_killed_during_a_run_with_two_ranks(servers, grpox, folder):
    """Killed after the second step and started again: every step is there, with all its completions."""
    done = []

    def train():
        done.append(run_with(grpox, "vllm-server", servers[:1], "killed", "train.max_steps=6", ranks=2))

    run = threading.Thread(target=train)
    run.start()
    metrics = folder / "runs/killed/metrics.jsonl"
    while run.is_alive() and (not metrics.exists() or len(metrics.read_text().splitlines()) < 2):
        time.sleep(0.05)
    servers[0].kill()
    servers[0].start()
    run.join()
    servers[0].wait_until_ready()
    assert done[0].returncode == 0, done[0].stderr[-3000:]
    assert "lost a server" in done[0].stderr
    steps = metrics_of(folder, "killed")
    assert [step["step"] for step in steps] == [1, 2, 3, 4, 5, 6]
    tokens = [0.0, *(step["metrics"]["num_tokens"] for step in steps)]
    # Each step has 256 completions of one to five tokens and their prompts, once each.
    assert all(256 * 5 < after - before < 256 * 13 for before, after in pairwise(tokens))
    assert all(step["metrics"]["sampling/difference_max"] < 1e-4 for step in steps)


def run_with(grpox, generator, servers, name, *overrides, ranks=1):
    urls = json.dumps([server.url for server in servers])
    return grpox(
        "train",
        "quickstart",
        f"generator={{name: {generator}, urls: {urls}, start_timeout: {LONGEST_WAIT}}}",
        f"train.per_device_train_batch_size={256 // ranks}",
        "evaluation=null",
        "tracking={}",
        f"output_dir=runs/{name}",
        *overrides,
        ranks=ranks,
    )


def metrics_of(folder, name):
    return [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
