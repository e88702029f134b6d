"""Sends a policy's weights to vLLM servers: through files that both sides see, or by vLLM's nccl backend."""

from __future__ import annotations

import asyncio
import itertools
import os
import secrets
import shutil
import socket
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from grpox.contracts import GeneratorContext, WeightStream
from grpox.errors import ConfigError, RunFailed
from grpox.toolkit import base_buffers, base_parameters
from grpox_generators.server_client import Fleet
from grpox_generators.vllm_weights import as_stored, from_all_ranks

Bucket = dict[str, torch.Tensor]


class FileSender:
    """Sends bucket by bucket: gathers and writes one while the servers load the one before."""

    def __init__(self, fleet: Fleet, bucket_bytes: int) -> None:
        self._fleet = fleet
        self._bucket_bytes = bucket_bytes
        self._written: list[Path] = []
        # Two runs that use one server by mistake must not overwrite each other's files.
        self._names = (f"{secrets.token_hex(4)}-{number:06d}.safetensors" for number in itertools.count())

    def send(self, weights: WeightStream) -> None:
        """Replace the weights of all servers in use; the fleet gives up a server that fails.

        Raises:
            RunFailed: the folder for weights cannot be written.
        """
        fleet = self._fleet
        fleet.post("/start_weight_update")
        loading: Future[None] | None = None
        self._written.clear()
        try:
            for bucket in buckets(weights, self._bucket_bytes):
                name = next(self._names)
                self._write(on_host(bucket), name)
                if loading is not None:
                    loading.result()
                loading = fleet.loop.start(self._load(name))
            if loading is not None:
                loading.result()
        finally:
            if loading is not None:
                loading.cancel()  # after an interrupt; otherwise it has ended
            for file in self._written:
                file.unlink(missing_ok=True)
        fleet.post("/finish_weight_update", {"weight_version": None})

    def close(self) -> None:
        """Do nothing: no file or connection is open."""

    def _write(self, bucket: Bucket, name: str) -> None:
        """Write the bucket into every server's folder, once for each file system."""
        first: Path | None = None
        for url, about in list(self._fleet.abouts.items()):
            folder = Path(about["weights_folder"])
            file = folder / name
            self._written.append(file)
            try:
                if first is None:
                    save_file(bucket, file)
                else:
                    try:
                        os.link(first, file)
                    except OSError:
                        shutil.copyfile(first, file)
            except (OSError, SafetensorError) as error:
                if folder.is_dir():
                    raise RunFailed(
                        f"weights cannot be written to {folder}: {error}\n"
                        "    use a smaller generator.bucket_mib, or another folder by grpox serve --weights-dir"
                    ) from error
                self._fleet.give_up(url, f"{url} has ended: its folder for weights is gone")
            else:
                first = first or file

    async def _load(self, name: str) -> None:
        body = {"update_info": {"file": name}}
        await self._fleet.post_each("/update_weights", dict.fromkeys(self._fleet.abouts, body))
        for about in list(self._fleet.abouts.values()):
            # A server that has loaded the file keeps it mapped until its layers are complete.
            Path(about["weights_folder"], name).unlink(missing_ok=True)


def buckets(weights: WeightStream, limit: int) -> Iterator[Bucket]:
    """Group parameters into buckets of up to `limit` bytes; a larger parameter is its own bucket."""
    bucket: Bucket = {}
    size = 0
    for name, tensor in weights:
        if bucket and size + tensor.nbytes > limit:
            yield bucket
            bucket, size = {}, 0
        bucket[name] = tensor.contiguous()
        size += tensor.nbytes
    if bucket:
        yield bucket


def on_host(bucket: Bucket) -> Bucket:
    """Copy a bucket from a GPU into pinned memory, and wait once for all of it; on a CPU return it as it is."""
    device = next(iter(bucket.values())).device
    if device.type == "cpu":
        return bucket
    copies = {
        name: torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
        for name, tensor in bucket.items()
    }
    torch.accelerator.current_stream(device).synchronize()
    return copies


class NcclSender:
    """vLLM's own transfer between GPUs: this process is rank 0 of a group with all workers of all servers.

    nccl does not notice that a member has ended: whoever sends to it waits for ever. So the first server that
    fails to answer over HTTP, when its process ends or after `generator.read_timeout`, ends the transfer.

    vLLM's trainer side reads the weights from this object, names and shapes first, without a gather. It calls
    the routes of a server here as well, each on all servers.
    """

    def __init__(self, fleet: Fleet, policy: Any, bucket_bytes: int) -> None:
        self._fleet = fleet
        self._policy = policy
        self._bucket_bytes = bucket_bytes
        self._weights: WeightStream = iter(())
        self._engine: Any = None
        self._group: tuple[str, ...] = ()
        self._failures: list[RunFailed] = []
        """Names the server that was lost in the last transfer."""

    def send(self, weights: WeightStream) -> None:
        """Replace the weights of all servers in use.

        Raises:
            RunFailed: a server was lost meanwhile.
        """
        group = tuple(about["instance"] for about in self._fleet.abouts.values())
        if group != self._group:
            self._join(group)
        self._weights = weights
        self._failures.clear()
        try:
            self._engine.send_weights()
        except Exception as error:
            self._abort()
            if self._failures and error is not self._failures[0]:
                raise self._failures[0] from error  # the transfer failed because a server did
            raise

    def close(self) -> None:
        """Leave the group."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _abort(self) -> None:
        """End a transfer that is under way, from whatever thread; the group is of no further use."""
        self._group = ()
        if self._engine is not None:
            self._engine.shutdown()  # vLLM's aborts the communicator, on which the sending thread may wait

    def _join(self, group: tuple[str, ...]) -> None:
        if self._engine is not None:
            self.close()
            self._fleet.post("/shutdown_weight_transfer_engine")
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        workers = sum(about["world_size"] for about in self._fleet.abouts.values())
        address = master_address(self._fleet.abouts)
        self._engine = open_nccl(address, port, 1 + workers, self._bucket_bytes, self)
        self._group = group

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer import ParamMeta

        return [ParamMeta(name, shape.dtype, tuple(shape.shape)) for name, shape in self.shapes()]

    def shapes(self) -> WeightStream:
        """Yield the tensors that will be sent, without their data."""
        named = itertools.chain(base_parameters(self._policy), base_buffers(self._policy))
        # Under ZeRO-3 a parameter's own shape is that of its shard.
        sizes = ((name, getattr(tensor, "ds_shape", tensor.shape), tensor.dtype) for name, tensor in named)
        empty = ((name, torch.empty(size, dtype=dtype, device="meta")) for name, size, dtype in sizes)
        return as_stored(self._policy, empty)

    def __iter__(self) -> WeightStream:
        return self._weights

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each server's workers follow those of the servers before it in the group."""
        offset, bodies = init_info["rank_offset"], {}
        for url, about in self._fleet.abouts.items():
            bodies[url] = {"init_info": init_info | {"rank_offset": offset}}
            offset += about["world_size"]
        self._post("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update", {})

    def update_weights(self, update_info: Any) -> None:
        body = {"update_info": update_info}
        self._post("/update_weights", dict.fromkeys(self._fleet.abouts, body))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = {"weight_version": weight_version}
        self._post("/finish_weight_update", dict.fromkeys(self._fleet.abouts, body))

    def _post(self, path: str, bodies: Mapping[str, Mapping[str, Any]]) -> None:
        """Ask all servers, and wait for no other once one has failed: those are waiting in nccl themselves."""

        async def ask(url: str) -> None:
            await self._fleet.post_each(path, {url: bodies.get(url)})
            if url not in self._fleet.abouts:  # the group cannot go on without one of its members
                lost = self._fleet.lost.get(url, url)
                raise RunFailed(f"a vLLM server was lost while it received weights by nccl: {lost}")

        async def ask_all() -> None:
            requests = [asyncio.ensure_future(ask(url)) for url in self._fleet.abouts]
            try:
                await asyncio.gather(*requests)
            finally:
                for each in requests:
                    each.cancel()

        try:
            self._fleet.loop.run(ask_all())
        except RunFailed as failure:
            self._failures.append(failure)
            self._abort()
            raise


def open_nccl(address: str, port: int, world_size: int, bucket_bytes: int, sender: NcclSender) -> Any:
    """Join vLLM's nccl transfer as its sender.

    Args:
        bucket_bytes: size of vLLM's two buffers, on both sides; 1 GiB each by default.

    Returns:
        vLLM's `TrainerWeightTransferEngine`: `send_weights` sends what `sender` yields, `shutdown` aborts.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

    # A weight that is larger than a buffer goes by itself, as vLLM also does it.
    warnings.filterwarnings("ignore", message="Tensor '.*' has size .* exceeds buffer_size_bytes")
    info = NCCLTrainerInitInfo(
        master_address=address,
        master_port=port,
        world_size=world_size,
        rank=0,
        packed_buffer_size_bytes=bucket_bytes,
    )
    return WeightTransferTrainerFactory.trainer_init(info, client=sender, source=sender)


def in_lockstep(weights: WeightStream, context: GeneratorContext, limit: int) -> WeightStream:
    """Yield the weights on rank 0, nothing on the other ranks, which gather with it; a collective.

    Up to `limit` bytes are gathered on all ranks, copied out of the gathered memory, and all ranks wait for one
    another on the CPU before rank 0 goes on to send them. So no GPU ever has a gather of the training ranks and
    a transfer to servers in flight at once: ranks that start the two in different orders wait for ever.
    """
    if context.world_size == 1:
        yield from weights
        return
    is_sender, on_gpu = context.rank == 0, context.device.type == "cuda"
    copied = (
        ((name, tensor.clone() if is_sender else tensor) for name, tensor in weights) if on_gpu else weights
    )
    for bucket in buckets(copied, limit):
        if on_gpu:
            torch.cuda.synchronize(context.device)
        from_all_ranks(None, context)
        while is_sender and bucket:
            name = next(iter(bucket))
            yield name, bucket.pop(name)
        if on_gpu:
            torch.cuda.synchronize(context.device)  # what was sent, on whatever stream


def master_address(urls: Iterable[str]) -> str:
    """Return the address of this machine at which the workers of all servers meet it.

    It is that on the route to a server on another machine, which servers here reach as well. Nothing is sent.

    Raises:
        ConfigError: a server elsewhere has only an IPv6 address, at which vLLM's rendezvous cannot listen.
    """
    routes = [_route_to(url) for url in urls]
    # A server here may be named by an address of this machine that other machines do not reach.
    return min(routes, key=lambda ends: (ip_address(ends[0]).is_loopback, ends[0] == ends[1]))[0]


def _route_to(url: str) -> tuple[str, str]:
    """Return the IPv4 addresses of this machine and of the server on the route between them."""
    parts = urlsplit(url)
    for family in (socket.AF_INET, socket.AF_INET6):
        with suppress(OSError):  # no such address, or no route there
            end = socket.getaddrinfo(parts.hostname, parts.port or 80, family, socket.SOCK_DGRAM)[0][4]
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(end)
                own, other = (str(each[0]).partition("%")[0] for each in (probe.getsockname(), end))
            if family == socket.AF_INET:
                return own, other
            if own == other:  # a server here
                return "127.0.0.1", "127.0.0.1"
    what = f"no IPv4 route leads to {url}, and vLLM's nccl transfer has no other"
    raise ConfigError(what, "generator.urls", given=url, allowed="a server with an IPv4 address")
