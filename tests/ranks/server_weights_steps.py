"""Sends ZeRO-3 weights to two servers by an engine of nccl's interface over gloo; run by torchrun on two ranks.

Usage: server_weights_steps.py OUT PORT PORT
Each rank saves OUT/rank-N.pt: the weights of the engine, the order of events, and how the sync ended that a
server did not survive. Each server saves OUT/server-N.pt after a transfer.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import zero3_step
from aiohttp import web
from transformers import AutoTokenizer

from grpox.cli.errors import leave
from grpox.contracts import GeneratorContext
from grpox.errors import RunFailed
from grpox.policy.engine import Engine
from grpox.policy.models import load_model
from grpox.rollout.sampler import CompletionSampler
from grpox.runtime.world import World, start_world
from grpox_generators import server_weights
from grpox_generators.configs import VllmServerConfig
from grpox_generators.server_weights import in_lockstep
from grpox_generators.vllm_server import VllmServerGenerator
from grpox_vllm_serving.protocol import PROTOCOL, TOKEN_VARIABLE, signature

TOKEN = "0123456789abcdef"
PATIENCE = timedelta(seconds=120)


def group_of(address: str, port: int, rank: int, size: int) -> dist.ProcessGroupGloo:
    """A group apart from the run's, as the transfer has one."""
    store = dist.TCPStore(address, port, size, rank == 0, PATIENCE, wait_for_workers=False)
    return dist.ProcessGroupGloo(store, rank, size, PATIENCE)


def broadcast(group: dist.ProcessGroupGloo, tensor: torch.Tensor, aborted: threading.Event) -> None:
    """As nccl does it: where a member has ended, the others wait until they are aborted."""
    try:
        group.broadcast([tensor], dist.BroadcastOptions()).wait()
    except RuntimeError:
        aborted.wait()


class GlooEngine:
    """The sending side, with the methods of vLLM's `TrainerWeightTransferEngine`."""

    def __init__(self, address: str, port: int, world_size: int, bucket_bytes: int, sender: Any) -> None:
        self.sender, self.aborted = sender, threading.Event()
        body = {"master_address": address, "master_port": port, "rank_offset": 1, "world_size": world_size}
        with ThreadPoolExecutor(max_workers=1) as beside:
            joining = beside.submit(sender.init_weight_transfer_engine, body)
            self.group = group_of(address, port, 0, world_size)
            joining.result()

    def send_weights(self) -> None:
        meta = [(each.name, list(each.shape)) for each in metadata(self.sender)]
        self.sender.start_weight_update()
        beside = ThreadPoolExecutor(max_workers=1)
        try:
            receiving = beside.submit(self.sender.update_weights, {"meta": meta})
            for name, tensor in self.sender:
                EVENTS.append(f"send {name}")
                if not self.aborted.is_set():
                    broadcast(self.group, tensor.contiguous(), self.aborted)
            receiving.result()
        finally:
            beside.shutdown(wait=False)
        self.sender.finish_weight_update()

    def shutdown(self) -> None:
        self.aborted.set()


def metadata(source: Any) -> list[Any]:
    """Names and shapes of what is sent; vLLM's own class for them is not needed."""
    return [SimpleNamespace(name=name, shape=shape.shape) for name, shape in source.shapes()]


EVENTS: list[str] = []
"""Events of rank 0, gathering and sending, in order."""


class Server:
    """A server with one worker, which ends in its second transfer if `dies`, after the third tensor."""

    def __init__(self, number: int, dies: bool, out: Path, model: dict[str, Any]) -> None:
        self.number, self.dies, self.out, self.model = number, dies, out, model
        self.version, self.transfers = "default", 0

    async def answer(self, request: web.Request) -> web.Response:
        body = await request.json() if request.can_read_body else {}
        loop = asyncio.get_running_loop()
        match request.path.rpartition("/")[2]:
            case "about":
                return web.json_response(self.about())
            case "update_weight_version":
                self.version = body["new_version"]
            case "init_weight_transfer_engine":
                await loop.run_in_executor(None, self.join, body["init_info"])
            case "update_weights":
                await loop.run_in_executor(None, self.receive, body["update_info"]["meta"])
        return web.json_response({"success": True})

    def about(self) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL, "grpox": "0", "instance": str(self.number), "model": "tiny",
            "signature": self.model, "dtype": "float32", "max_model_len": 64, "max_num_seqs": 8,
            "world_size": 1, "transfer": "nccl", "weights_folder": "", "weight_version": self.version,
        }  # fmt: skip

    def join(self, info: dict[str, Any]) -> None:
        place = info["master_address"], info["master_port"], info["rank_offset"], info["world_size"]
        self.group = group_of(*place)

    def receive(self, meta: list[tuple[str, list[int]]]) -> None:
        self.transfers += 1
        weights = {}
        for place, (name, shape) in enumerate(meta):
            if self.dies and self.transfers == 2 and place == 3:
                os._exit(1)
            weights[name] = torch.empty(shape)
            broadcast(self.group, weights[name], threading.Event())
        torch.save(weights, self.out / f"server-{self.number}.pt")


def serve(server: Server, port: int) -> None:
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.answer)
    web.run_app(app, host="127.0.0.1", port=port, print=None, handle_signals=True)


def start_servers(ports: list[int], out: Path, model: dict[str, Any]) -> list[Any]:
    fork = multiprocessing.get_context("fork")
    servers = [Server(number, number == 1, out, model) for number in range(len(ports))]
    started = [fork.Process(target=serve, args=each, daemon=True) for each in zip(servers, ports, strict=True)]
    for each in started:
        each.start()
    return started


class Watched:
    """An engine whose gathers are noted."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    @property
    def steps(self) -> int:
        return self.engine.steps

    def weights(self) -> Any:
        for name, tensor in self.engine.weights():
            EVENTS.append(f"gather {name}")
            yield name, tensor


def clocks(world: World, context: GeneratorContext) -> list[int]:
    """Count steps of both ranks through a stream that needs no gather: only the barriers hold a rank back."""
    store = dist.distributed_c10d._get_default_store()
    stream = ((str(number), torch.zeros(4)) for number in range(6))
    seen = [store.add("clock", 1) for _ in in_lockstep(stream, context, 16)]
    return seen if world.is_main else [store.add("clock", 1)]


def main(out: Path, ports: list[int]) -> None:
    os.environ[TOKEN_VARIABLE] = TOKEN
    config = zero3_step.config_for("dapo", 0.0, 6, 1)
    model = load_model(config.model)
    started: list[Any] = []
    if os.environ["RANK"] == "0":
        started = start_servers(ports, out, signature(model.config))
    world = start_world()
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    server_weights.open_nccl = GlooEngine  # type: ignore[assignment]
    tokenizer = AutoTokenizer.from_pretrained(config.model.path)
    engine = zero3_step.engine_of(config, world, model)
    context: Any = SimpleNamespace(
        policy=engine.module, tokenizer=tokenizer, device=world.device, rank=world.rank,
        world_size=world.size, stop_token_ids=(), seed=0, model_path=config.model.path,
    )  # fmt: skip
    generator = VllmServerGenerator(VllmServerConfig(urls=urls, bucket_mib=1, start_timeout=60))
    generator.start(context)
    sampler = CompletionSampler(Watched(engine), generator, world, 0)
    sampler.sync()
    found: dict[str, Any] = {"events": list(EVENTS), "urls": urls}
    found["weights"] = {name: tensor.clone() for name, tensor in engine.weights()}
    found["clocks"] = clocks(world, context)
    engine.steps = 1  # new weights, as far as the servers know
    try:
        sampler.sync()
    except RunFailed as error:
        found["failure"] = str(error)
    world.barrier()  # no rank is left in another collective
    torch.save(found, out / f"rank-{world.rank}.pt")
    generator.close()
    for each in started:
        each.kill()
        each.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]), [*map(int, sys.argv[2:])])
    leave(0)
