"""One server over HTTP: pieces of completions put together, and what each failure means."""

import asyncio
import json
import signal

import pytest
from aiohttp import web
from pydantic import ValidationError
from support.patience import patient
from transformers import LlamaConfig

from grpox.errors import ConfigError, RunFailed
from grpox.runtime import signals
from grpox.runtime.signals import Terminated
from grpox_generators import server_client
from grpox_generators.configs import VllmServerConfig
from grpox_generators.server_client import Fleet, ServerClient, ServerLost, serve_command
from grpox_generators.vllm_server import PendingRequests
from grpox_vllm_serving.protocol import PROTOCOL, differences, signature

TOKEN = "0123456789abcdef"
MODEL = {"model_type": "llama", "hidden_size": 8}


def answered(handler, work, **settings):
    """Return the result of `work(client)`, with a real server on a real port that answers by `handler`."""

    async def run():
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        client = ServerClient(site_url(site), TOKEN, VllmServerConfig(**settings))
        try:
            return await work(client)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(run())


def site_url(site):
    return f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"


def choice(index, tokens, reason=None, version="run/1"):
    content = [{"token_id": token, "logprob": -token / 10} for token in tokens]
    spans = [{"version": version, "start": 0, "end": 9}] if reason else None
    whole = {"index": index, "token_ids": tokens, "finish_reason": reason, "weight_versions": spans}
    return {"choices": [whole | {"logprobs": {"content": content}}]}


def streaming(*events, cut=False):
    async def handler(request):
        assert request.headers["Authorization"] == f"Bearer {TOKEN}"
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if cut:
            request.transport.abort()
            return response
        await response.write(b"data: [DONE]\n\n")
        return response

    return handler


async def completions(client):
    return [completion async for completion in client.complete([1, 2], {"n": 2, "max_tokens": 17})]


def test_pieces_become_completions_in_the_order_of_their_ends():
    events = [choice(0, [1]), choice(1, [2]), choice(1, [3, 4], "stop"), choice(0, [5], "length")]
    second, first = answered(streaming(*events), completions)
    assert (second.index, second.token_ids, second.finish_reason) == (1, [2, 3, 4], "stop")
    assert second.logprobs == [-0.2, -0.3, -0.4]
    assert (first.index, first.token_ids, first.finish_reason) == (0, [1, 5], "length")
    assert first.versions == ("run/1",)


def test_a_long_completion_is_one_line():
    (long,) = answered(streaming(choice(0, list(range(60000)), "length")), completions)
    assert len(long.token_ids) == 60000


def test_short_completions_come_in_one_answer():
    async def handler(request):
        asked = await request.json()
        assert asked["stream"] is False
        both = [choice(index, [index + 3], "stop")["choices"][0] for index in range(2)]
        return web.json_response({"choices": both})

    async def short(client):
        return [done async for done in client.complete([1, 2], {"n": 2, "max_tokens": 16})]

    assert [done.token_ids for done in answered(handler, short)] == [[3], [4]]


@pytest.mark.parametrize("cut", [False, True])
def test_a_stream_that_ends_in_the_middle_is_a_lost_server(cut):
    with pytest.raises(ServerLost):
        answered(streaming(choice(0, [1]), cut=cut), completions)


def test_what_vllm_refuses_in_the_stream_is_the_users_mistake():
    refusal = {"error": {"message": "top_p must be in (0, 1]", "code": 400}}
    with pytest.raises(ConfigError, match="vLLM does not accept these settings: top_p"):
        answered(streaming(refusal), completions)
    with pytest.raises(ServerLost, match="engine died"):
        answered(streaming({"error": {"message": "engine died", "code": 500}}), completions)


def status(code, body="{}"):
    async def handler(request):
        return web.Response(status=code, text=body)

    return handler


@pytest.mark.parametrize(
    ("code", "error"),
    [(401, ConfigError), (400, ConfigError), (422, ConfigError), (500, ServerLost), (503, ServerLost)],
)
def test_what_a_status_means(code, error):
    with pytest.raises(error):
        answered(status(code), completions)


def test_a_refusal_tells_vllms_own_words():
    body = json.dumps({"error": {"message": "too hot"}})
    with pytest.raises(ConfigError, match="too hot"):
        answered(status(400, body), completions)


def test_another_kind_of_server_is_told():
    with pytest.raises(ConfigError, match="is not a server started by `grpox serve`"):
        answered(status(404), lambda client: client.about())
    with pytest.raises(ServerLost):
        answered(status(200, "<html>"), lambda client: client.about())


def test_a_server_that_hangs_is_lost(monkeypatch):
    async def handler(request):
        await asyncio.sleep(600)

    with pytest.raises(ServerLost):
        answered(handler, completions, read_timeout=0.1)
    monkeypatch.setattr(server_client, "LONGEST_LOOK", 0.1)
    with pytest.raises(ServerLost, match=r"0\.1 s"):
        answered(handler, lambda client: client.about())


def test_a_server_is_asked_again_while_requests_are_open(monkeypatch):
    monkeypatch.setattr(server_client, "SECONDS_BETWEEN_LOOKS", 0.0)
    versions = ["run/1", "run/1", "default"]

    async def restarts(request):
        return web.json_response({"weight_version": versions.pop(0)})

    with pytest.raises(ServerLost, match="has weights default instead of run/1"):
        answered(restarts, lambda client: client.watch("run/1"))
    answers = [500, 200, 500, 500]

    async def fails(request):
        return web.json_response({"weight_version": "run/1"}, status=answers.pop(0))

    with pytest.raises(ServerLost, match="answers 500"):
        answered(fails, lambda client: client.watch("run/1"))
    assert answers == []  # once is no loss


def test_a_signal_ends_the_wait_for_a_server(fleet, monkeypatch):
    """A signal lets the step end first, but a step without a server has no end."""
    silent = fleet(ServerLost("u: refused"), start_timeout=600.0)
    received = [(signal.SIGTERM, 0.0)]
    monkeypatch.setattr(signals, "_received", received)
    with pytest.raises(Terminated):
        silent.find()
    monkeypatch.setattr(server_client, "SILENCE", 0.0)
    with pytest.raises(Terminated):
        silent.loop.run(asyncio.sleep(600))
    pending = PendingRequests(silent, [], [], "run/1", 1)
    pending._work = silent.loop.start(asyncio.sleep(600))
    pending._inbox.get()
    for wait in (pending.wait, lambda: list(pending.arriving())):
        with pytest.raises(Terminated):
            wait()
    received.clear()


@pytest.fixture
def fleet(monkeypatch):
    """Makes a fleet, and closes it."""
    made = []

    def make(*abouts, **settings):
        made.append(fleet_that_hears(monkeypatch, *abouts, **settings))
        return made[-1]

    yield make
    for one in made:
        one.close()


def fleet_that_hears(monkeypatch, *abouts, **settings):
    """A fleet whose servers say of themselves what `abouts` hold, one at each look, the last for ever."""
    monkeypatch.setenv("GRPOX_SERVER_TOKEN", TOKEN)
    left = list(abouts)

    async def about(self):
        told = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(told, Exception):
            raise told
        return told

    monkeypatch.setattr(ServerClient, "about", about)
    return Fleet(VllmServerConfig(**{"start_timeout": 0.0} | settings), MODEL)


def about(folder, **changes):
    (folder / "instance").write_text("start-1")
    told = {"protocol": PROTOCOL, "grpox": "0.1.0", "instance": "start-1", "model": "m", "signature": MODEL}
    told |= {"transfer": "grpox_file", "weights_folder": str(folder), "weight_version": "default"}
    return told | changes


def test_a_server_of_another_protocol_or_model_is_refused_by_name(fleet, tmp_path):
    with pytest.raises(ConfigError, match=r"runs grpox 9\.9, which uses a different protocol"):
        fleet(about(tmp_path, protocol=PROTOCOL + 1, grpox="9.9")).find()
    with pytest.raises(ConfigError, match="m: hidden_size is 9 there and 8 here"):
        fleet(about(tmp_path, signature=MODEL | {"hidden_size": 9})).find()


def test_a_folder_that_only_the_server_sees_is_told(fleet, tmp_path):
    with pytest.raises(ConfigError, match="--weights-dir"):
        fleet(about(tmp_path, weights_folder=str(tmp_path / "elsewhere"))).find()
    with pytest.raises(ConfigError, match="--weights-dir"):
        fleet(about(tmp_path, instance="another-start")).find()


def test_a_server_that_comes_up_later_is_waited_for(fleet, monkeypatch, tmp_path, logged):
    monkeypatch.setattr(server_client, "SECONDS_BETWEEN_SEARCHES", 0.0)
    late = fleet(ServerLost("u: refused"), ServerLost("u: refused"), about(tmp_path), start_timeout=patient(5))
    assert late.find()
    told = logged()
    assert told.count("waiting for a server") == 1
    assert "http://127.0.0.1:8000 answers" in told
    never = fleet(ServerLost("u: refused"))
    assert not never.find()
    assert "u: refused" in never.none_answers().what
    assert "start one with `grpox serve MODEL`" in never.none_answers().allowed


@pytest.mark.parametrize(
    ("settings", "command"),
    [
        ({}, "grpox serve ./my-model"),
        ({"urls": ["http://localhost:8001", "http://b:8000"]}, "grpox serve ./my-model --port 8001"),
        ({"urls": ["http://gpu-2:8000"]}, "grpox serve ./my-model --host gpu-2"),
        ({"token_file": "my token"}, "grpox serve ./my-model --token-file 'my token'"),
    ],
)
def test_the_command_that_starts_the_server_is_told(settings, command):
    assert serve_command(VllmServerConfig(**settings), "./my-model") == command


def test_a_machine_on_which_no_server_was_started_is_told_the_command(monkeypatch, tmp_path):
    monkeypatch.delenv("GRPOX_SERVER_TOKEN", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="no vLLM server was started") as caught:
        Fleet(VllmServerConfig(), MODEL, path="org/name")
    assert caught.value.problems[0].allowed.startswith("after: grpox serve org/name; or a file")


def test_weights_of_another_run_are_noticed_and_a_restart_is_not_taken_for_one(fleet, tmp_path):
    ours, theirs = about(tmp_path, weight_version="ours/3"), about(tmp_path, weight_version="theirs/1")
    used = fleet(ours, theirs)
    used.look()
    used.sent("ours/3")
    with pytest.raises(RunFailed, match=r"another run has sent weights \(theirs/1\)"):
        used.look()
    restarted = fleet(ours, about(tmp_path, instance="start-1", weight_version="default"))
    restarted.look()
    restarted._ours = {"an earlier start": "ours/3"}
    assert restarted.look()


def test_a_server_that_was_given_up_waits_for_the_next_weights(fleet, tmp_path, logged):
    used = fleet(about(tmp_path))
    (url,) = used.look()
    used.give_up(url, "u: broken")
    assert not used.look()
    assert used.lost == {url: "u: broken"}
    used.readmit()
    assert [*used.look()] == [url]
    assert used.last_loss == "u: broken"


def test_a_process_that_sends_no_weights_need_not_see_the_folder(monkeypatch, tmp_path):
    hidden = about(tmp_path, weights_folder=str(tmp_path / "elsewhere"))
    other_rank = fleet_that_hears(monkeypatch, hidden)
    other_rank._sends_weights = False
    assert other_rank.look()
    other_rank.close()


@pytest.mark.parametrize(
    "url",
    ["127.0.0.1:8000", "ftp://host:1", "http://", "http://host:99999", "http://me:pw@host:1", "http://h:1?x=1"],
)
def test_addresses_are_checked(url):
    with pytest.raises(ValidationError, match="does not have the form http://HOST:PORT"):
        VllmServerConfig(urls=[url])


def test_one_address_is_one_server():
    assert VllmServerConfig(urls=["http://a:1/", "https://b:2"]).urls == ["http://a:1", "https://b:2"]
    with pytest.raises(ValidationError, match="names one server twice"):
        VllmServerConfig(urls=["http://a:1", "http://a:1/"])
    with pytest.raises(ValidationError):
        VllmServerConfig(urls=[])


def test_models_differ_in_their_shape_and_not_in_their_weights():
    ours = signature(LlamaConfig(hidden_size=64, vocab_size=17))
    assert differences(ours, signature(LlamaConfig(hidden_size=64, vocab_size=17, rope_theta=1.0))) == []
    other = signature(LlamaConfig(hidden_size=32, vocab_size=18, head_dim=2))
    assert differences(ours, other) == [
        "vocab_size is 18 there and 17 here",
        "hidden_size is 32 there and 64 here",
    ]
