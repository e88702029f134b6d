"""Servers over HTTP: completions in pieces, the meaning of each failure, and weights on their way."""

import asyncio
import json
import signal
import socket
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from aiohttp import web
from pydantic import ValidationError
from safetensors import SafetensorError
from support.patience import patient
from support.problems import problem_of
from transformers import LlamaConfig

from grpox.errors import ConfigError, RunFailed
from grpox.runtime import signals
from grpox.runtime.signals import Terminated
from grpox_generators import server_client, server_weights
from grpox_generators.configs import VllmServerConfig
from grpox_generators.server_client import Fleet, ServerClient, ServerLost, ServerUnfit, serve_command
from grpox_generators.server_weights import FileSender, buckets, in_lockstep, master_address
from grpox_generators.vllm_server import PendingRequests, VllmServerGenerator
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
        url = f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
        client = ServerClient(url, TOKEN, VllmServerConfig(**settings))
        try:
            return await work(client)
        finally:
            await client.close()
            await runner.cleanup()

    return asyncio.run(run())


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


async def completions(client, most=17):
    return [completion async for completion in client.complete([1, 2], {"n": 2, "max_tokens": most})]


def test_pieces_become_completions_in_the_order_of_their_ends():
    events = [choice(0, [1]), choice(1, [2]), choice(1, [3, 4], "stop"), choice(0, [5], "length")]
    second, first = answered(streaming(*events), completions)
    assert (second.index, second.token_ids, second.finish_reason) == (1, [2, 3, 4], "stop")
    assert second.logprobs == [-0.2, -0.3, -0.4]
    assert (first.index, first.token_ids, first.finish_reason) == (0, [1, 5], "length")
    assert first.versions == ("run/1",)
    (long,) = answered(streaming(choice(0, list(range(60000)), "length")), completions)
    assert len(long.token_ids) == 60000  # in one line


def test_short_completions_come_in_one_answer():
    async def handler(request):
        asked = await request.json()
        assert asked["stream"] is False
        both = [choice(index, [index + 3], "stop")["choices"][0] for index in range(2)]
        return web.json_response({"choices": both})

    found = answered(handler, lambda client: completions(client, 16))
    assert [done.token_ids for done in found] == [[3], [4]]


def status(code, body="{}"):
    async def handler(request):
        return web.Response(status=code, text=body)

    return handler


def failing(message, code):
    return {"error": {"message": message, "code": code}}


@pytest.mark.parametrize(
    ("handler", "work", "error", "text"),
    [
        (streaming(choice(0, [1])), completions, ServerLost, "ended 1 completions in the middle"),
        (streaming(choice(0, [1]), cut=True), completions, ServerLost, "127"),
        (streaming(failing("top_p is 2", 400)), completions, ConfigError, "these settings: top_p is 2"),
        (streaming(failing("engine died", 500)), completions, ServerLost, "engine died"),
        (status(401), completions, ConfigError, r"generator\.token_file: .* refuses the token"),
        (status(400, json.dumps(failing("too hot", 0))), completions, ConfigError, "too hot"),
        (status(422, "too cold"), completions, ConfigError, "too cold"),
        (status(500), completions, ServerLost, "answers 500"),
        (status(503), completions, ServerLost, "answers 503"),
        (status(404), completions, ServerLost, "answers 404"),
        (status(404), ServerClient.about, ConfigError, "is not a server started by `grpox serve`"),
        (status(400), ServerClient.about, ServerLost, "answers 400"),
        (status(200, "<html>"), ServerClient.about, ServerLost, "127"),
    ],
)
def test_an_answer_is_the_users_mistake_or_a_lost_server(handler, work, error, text):
    with pytest.raises(error, match=text):
        answered(handler, work)


def test_a_server_that_hangs_is_lost(monkeypatch):
    async def handler(request):
        await asyncio.sleep(600)

    with pytest.raises(ServerUnfit):
        answered(handler, completions, read_timeout=0.1)
    monkeypatch.setattr(server_client, "LONGEST_LOOK", 0.1)
    with pytest.raises(ServerLost, match=r"0\.1 s"):
        answered(handler, ServerClient.about)


@pytest.mark.parametrize(
    ("answers", "text"),
    [
        ([(200, "run/1"), (200, "run/1"), (200, "default")], "has weights default instead of run/1"),
        ([(500, ""), (200, "run/1"), (500, ""), (500, "")], "answers 500"),  # once is no loss
    ],
)
def test_a_server_is_asked_again_while_requests_are_open(answers, text, monkeypatch):
    monkeypatch.setattr(server_client, "SECONDS_BETWEEN_LOOKS", 0.0)
    left = list(answers)

    async def handler(request):
        code, version = left.pop(0)
        return web.json_response({"weight_version": version}, status=code)

    with pytest.raises(ServerLost, match=text):
        answered(handler, lambda client: client.watch("run/1"))
    assert left == []


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
    """Makes a fleet whose servers say what `abouts` hold: one at each look, the last for ever."""
    monkeypatch.setenv("GRPOX_SERVER_TOKEN", TOKEN)
    made = []

    def make(*abouts, sends_weights=True, **settings):
        left = list(abouts)

        async def about(self):
            told = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(told, Exception):
                raise told
            return told

        monkeypatch.setattr(ServerClient, "about", about)
        made.append(Fleet(VllmServerConfig(**{"start_timeout": 0.0} | settings), MODEL, sends_weights))
        return made[-1]

    yield make
    for one in made:
        one.close()


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


def test_a_folder_that_only_the_server_sees_is_refused_to_the_process_that_sends_weights(fleet, tmp_path):
    hidden, another = about(tmp_path, weights_folder=str(tmp_path / "x")), about(tmp_path, instance="another")
    for each in (hidden, another):
        with pytest.raises(ConfigError, match="--weights-dir"):
            fleet(each).find()
        assert fleet(each, sends_weights=False).look()


def test_a_server_that_comes_up_later_is_waited_for(fleet, monkeypatch, tmp_path, logged):
    monkeypatch.setattr(server_client, "SECONDS_BETWEEN_SEARCHES", 0.0)
    late = fleet(ServerLost("u: refused"), ServerLost("u: refused"), about(tmp_path), start_timeout=patient(5))
    assert late.find()
    told = logged()
    assert told.count("waiting for a server") == 1
    assert "http://127.0.0.1:8000 answers" in told
    assert not fleet(ServerLost("u: refused")).find()


def test_without_a_server_the_model_is_loaded_only_if_one_may_come(monkeypatch, logged):
    monkeypatch.setenv("GRPOX_SERVER_TOKEN", TOKEN)
    settings = {"urls": ["http://127.0.0.1:9"]}
    VllmServerGenerator(VllmServerConfig(**settings, start_timeout=60)).preflight(LlamaConfig())
    assert "no server answers yet; loading the model meanwhile: http://127.0.0.1:9" in logged()
    asked = VllmServerGenerator(VllmServerConfig(**settings, start_timeout=0))
    problem = problem_of(asked.preflight, LlamaConfig(name_or_path="./m"))
    assert (problem.key, problem.given) == ("generator.urls", "http://127.0.0.1:9")
    assert "no vLLM server answers: http://127.0.0.1:9" in problem.what
    assert "grpox serve ./m --port 9" in problem.allowed


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
    problem = problem_of(Fleet, VllmServerConfig(), MODEL, path="org/name")
    assert "no vLLM server was started" in problem.what
    assert problem.allowed.startswith("after: grpox serve org/name; or a file")


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


def test_addresses_are_checked_and_each_is_named_once():
    for url in ("h:8000", "ftp://h:1", "http://", "http://h:99999", "http://me:pw@h:1", "http://h:1?x=1"):
        with pytest.raises(ValidationError, match="does not have the form http://HOST:PORT"):
            VllmServerConfig(urls=[url])
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


def stream(sizes: list[int], asked: list[int] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    for number, size in enumerate(sizes):
        if asked is not None:
            asked.append(number)
        yield str(number), torch.full((size,), float(number))


def test_buckets_hold_up_to_the_limit_in_order_and_are_asked_for_when_they_are_used() -> None:
    assert [[*bucket] for bucket in buckets(stream([2, 2, 1, 9, 1]), 16)] == [["0", "1"], ["2"], ["3"], ["4"]]
    assert [*buckets(iter(()), 16)] == []
    asked: list[int] = []
    next(buckets(stream([4] * 4, asked), 16))
    assert asked == [0, 1]


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Routes that were asked, each answered with success."""
    paths = []

    async def post(self: ServerClient, path: str, body: Any = None) -> dict[str, Any]:
        paths.append(path)
        return {}

    monkeypatch.setattr(ServerClient, "post", post)
    return paths


@pytest.fixture
def used(fleet, tmp_path, posted):
    made = fleet(about(tmp_path))
    made.look()
    return made


def test_weights_go_through_the_folder_bucket_by_bucket_and_leave_nothing(used, tmp_path, posted, monkeypatch):
    """Each file holds the copies on the host."""
    written, save = [], server_weights.save_file

    def noted(bucket, file):
        written.append({name: each.tolist() for name, each in bucket.items()})
        save(bucket, file)

    monkeypatch.setattr(server_weights, "on_host", lambda bucket: {n: 7 + each for n, each in bucket.items()})
    monkeypatch.setattr(server_weights, "save_file", noted)
    FileSender(used, 16).send(stream([4, 4]))
    assert posted == ["/start_weight_update", "/update_weights", "/update_weights", "/finish_weight_update"]
    assert [file.name for file in tmp_path.iterdir()] == ["instance"]
    assert written == [{"0": [7.0] * 4}, {"1": [8.0] * 4}]


def test_a_folder_that_is_gone_is_a_lost_server(used, tmp_path):
    (tmp_path / "instance").unlink()
    tmp_path.rmdir()
    weights = stream([4, 4])
    FileSender(used, 16).send(weights)
    assert [*weights] == []
    assert "its folder for weights is gone" in used.last_loss
    tmp_path.mkdir()


def test_a_folder_without_room_is_told_with_what_helps(used, monkeypatch):
    def full(*_):
        raise SafetensorError("No space left on device")

    monkeypatch.setattr(server_weights, "save_file", full)
    with pytest.raises(RunFailed, match=r"No space left(.|\n)*bucket_mib"):
        FileSender(used, 16).send(stream([4]))


def test_a_bucket_on_a_gpu_comes_to_pinned_memory_with_one_wait(monkeypatch):
    """The copies are ordered without a wait, and the host waits for all before it reads any."""
    events = []

    class Copy:
        def copy_(self, tensor, non_blocking):
            events.append(("copy", tensor, non_blocking))
            return self

    def empty_like(tensor, *, device, pin_memory):
        events.append(("memory", torch.device(device).type, pin_memory))
        return Copy()

    def current_stream(device):
        return SimpleNamespace(synchronize=lambda: events.append(("wait", device)))

    on_cpu = {"a": torch.ones(4)}
    assert server_weights.on_host(on_cpu) is on_cpu
    monkeypatch.setattr(torch, "empty_like", empty_like)
    monkeypatch.setattr(torch.accelerator, "current_stream", current_stream)
    gpu = torch.device("cuda", 1)
    one, other = (SimpleNamespace(name=name, device=gpu) for name in ("one", "other"))
    assert list(server_weights.on_host({"one": one, "other": other})) == ["one", "other"]
    memory = ("memory", "cpu", True)
    assert events == [memory, ("copy", one, True), memory, ("copy", other, True), ("wait", gpu)]


ROUTES = {
    "here": ("127.0.0.1", "127.0.0.1"),
    "this-machine": ("192.168.0.7", "192.168.0.7"),
    "elsewhere": ("10.1.0.7", "10.1.0.9"),
}
"""Host -> address of this machine on the way there, and the host's own."""


@pytest.mark.parametrize(
    ("hosts", "address"),
    [
        (["here"], "127.0.0.1"),
        (["here", "this-machine"], "192.168.0.7"),
        (["here", "this-machine", "elsewhere"], "10.1.0.7"),
        (["elsewhere", "here"], "10.1.0.7"),
    ],
)
def test_all_meet_at_the_address_that_leads_to_a_server_elsewhere(hosts, address, monkeypatch):
    monkeypatch.setattr(server_weights, "_route_to", ROUTES.__getitem__)
    assert master_address(hosts) == address


def test_servers_here_are_met_on_loopback_and_others_need_ipv4(monkeypatch):
    for host in ("127.0.0.1:8000", "localhost:8000", "127.0.0.2", "[::1]:8000"):
        assert master_address([f"http://{host}"]).startswith("127.0.0.")
    problem = problem_of(master_address, ["http://[2001:db8::2]:8000"])
    assert (problem.key, problem.given) == ("generator.urls", "http://[2001:db8::2]:8000")

    def resolve(host, port, family, kind):
        if family == socket.AF_INET:
            raise socket.gaierror(socket.EAI_NONAME, "no such name")
        return [(family, kind, 17, "", ("::1", port, 0, 0))]

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    assert master_address(["http://six:8000"]) == "127.0.0.1"


def test_a_rank_alone_reads_the_stream_as_it_is():
    asked: list[int] = []
    alone: Any = SimpleNamespace(world_size=1, rank=0, device=torch.device("cpu"))
    next(in_lockstep(stream([4] * 3, asked), alone, 1 << 20))
    assert asked == [0]
