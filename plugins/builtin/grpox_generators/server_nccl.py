"""Sends a policy's weights to vLLM servers by vLLM's nccl backend, in step with gathers of training ranks."""

from __future__ import annotations

import asyncio
import socket
import warnings
from collections.abc import Callable, Iterable, Mapping
from ipaddress import ip_address
from itertools import chain
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import torch

from grpox.contracts import GeneratorContext, WeightStream
from grpox.errors import ConfigError, RunFailed
from grpox.toolkit import base_buffers, base_parameters
from grpox_generators.ranks import from_all_ranks
from grpox_generators.server_fleet import Fleet
from grpox_generators.server_weights import buckets
from grpox_generators.stored_names import as_stored


class NcclSender:
    """vLLM's own transfer between GPUs: this process is rank 0 of a group with all workers of all servers.

    nccl does not notice that a member has ended: whoever sends to it waits for ever. So the first server that
    fails to answer over HTTP, when its process ends or after `generator.read_timeout`, ends the transfer.
    """

    def __init__(self, fleet: Fleet, policy: Any, bucket_bytes: int) -> None:
        self._fleet = fleet
        self._bucket_bytes = bucket_bytes
        self._source = _StreamSource(policy)
        self._routes = _WeightRoutes(fleet, self._abort)
        self._engine: Any = None
        self._group: tuple[str, ...] = ()

    def send(self, weights: WeightStream) -> None:
        """Replace the weights of all servers in use.

        Raises:
            RunFailed: a server was lost meanwhile.
        """
        group = tuple(about["instance"] for about in self._fleet.abouts.values())
        if group != self._group:
            self._join(group)
        self._source.weights = weights
        self._routes.begin()
        try:
            self._engine.send_weights()
        except Exception as error:
            self._abort()
            if self._routes.failure is not None and error is not self._routes.failure:
                raise self._routes.failure from error  # the transfer failed because a server did
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
        place = address, port, 1 + workers
        self._engine = open_nccl(*place, self._bucket_bytes, self._routes, self._source)
        self._group = group


def open_nccl(
    address: str, port: int, world_size: int, bucket_bytes: int, routes: _WeightRoutes, source: _StreamSource
) -> Any:
    """Join vLLM's nccl transfer as its sender.

    Args:
        bucket_bytes: size of vLLM's two buffers, on both sides; 1 GiB each by default.

    Returns:
        vLLM's `TrainerWeightTransferEngine`: `send_weights` sends what `source` yields, `shutdown` aborts.
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
    return WeightTransferTrainerFactory.trainer_init(info, client=routes, source=source)


class _WeightRoutes:
    """Routes that vLLM's trainer side calls, called on all servers.

    Args:
        abort: ends the transfer for which the servers were asked.
    """

    def __init__(self, fleet: Fleet, abort: Callable[[], None]) -> None:
        self._fleet = fleet
        self._abort = abort
        self.failure: RunFailed | None = None
        """Names the server that was lost in a transfer."""

    def begin(self) -> None:
        """Forget the failure of an earlier transfer."""
        self.failure = None

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each server's workers follow those of the servers before it in the group."""
        offset, bodies = init_info["rank_offset"], {}
        for url, about in self._fleet.abouts.items():
            bodies[url] = {"init_info": init_info | {"rank_offset": offset}}
            offset += about["world_size"]
        self._post_each("/init_weight_transfer_engine", bodies)

    def start_weight_update(self) -> None:
        self._post("/start_weight_update")

    def update_weights(self, update_info: Any) -> None:
        self._post("/update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("/finish_weight_update", {"weight_version": weight_version})

    def _post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        self._post_each(path, dict.fromkeys(self._fleet.abouts, body))

    def _post_each(self, path: str, bodies: Mapping[str, Mapping[str, Any] | None]) -> None:
        try:
            self._fleet.loop.run(self._until_one_fails(path, bodies))
        except RunFailed as failure:
            self.failure = failure
            self._abort()
            raise

    async def _until_one_fails(self, path: str, bodies: Mapping[str, Mapping[str, Any] | None]) -> None:
        """Ask all servers, and wait for no other once one has failed: those are waiting in nccl themselves."""
        requests = [asyncio.ensure_future(self._ask(url, path, body)) for url, body in bodies.items()]
        try:
            await asyncio.gather(*requests)
        finally:
            for each in requests:
                each.cancel()

    async def _ask(self, url: str, path: str, body: Mapping[str, Any] | None) -> None:
        await self._fleet.post_each(path, {url: body})
        if url not in self._fleet.abouts:  # the group cannot go on without one of its members
            raise RunFailed(
                f"a vLLM server was lost while it received weights by nccl: {self._fleet.lost.get(url, url)}"
            )


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


class _StreamSource:
    """The run's stream of weights as vLLM's trainer side reads it: names and shapes first, without a gather."""

    def __init__(self, policy: Any) -> None:
        self._policy = policy
        self.weights: WeightStream = iter(())

    def metadata(self) -> list[Any]:
        from vllm.distributed.weight_transfer import ParamMeta

        return [
            ParamMeta(name, shape.dtype, tuple(shape.shape))
            for name, shape in as_stored(self._policy, self._shapes())
        ]

    def _shapes(self) -> WeightStream:
        """Return the tensors that will be streamed, without their data."""
        for name, tensor in chain(base_parameters(self._policy), base_buffers(self._policy)):
            # Under ZeRO-3 a parameter's own shape is that of its shard.
            shape = getattr(tensor, "ds_shape", tensor.shape)
            yield name, torch.empty(shape, dtype=tensor.dtype, device="meta")

    def __iter__(self) -> WeightStream:
        return self.weights


def master_address(urls: Iterable[str]) -> str:
    """Return the address of this machine at which the workers of all servers meet it.

    It is that on the route to a server on another machine, which servers here reach as well. Nothing is sent.

    Raises:
        ConfigError: a server elsewhere has only an IPv6 address, at which vLLM's rendezvous cannot listen.
    """
    routes = [_route_to(url) for url in urls]
    # A server here may be named by an address of this machine that other machines do not reach.
    return min(routes, key=lambda route: (ip_address(route.own).is_loopback, route.own == route.other)).own


class _Route(NamedTuple):
    """Addresses of the two ends of a route."""

    own: str
    other: str


def _route_to(url: str) -> _Route:
    parts = urlsplit(url)
    ends = socket.getaddrinfo(parts.hostname, parts.port or 80, type=socket.SOCK_DGRAM)
    for family, _, _, _, end in sorted(ends, key=lambda each: each[0] != socket.AF_INET):
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect(end)
            except OSError:  # no route over this family
                continue
            route = _Route(probe.getsockname()[0].partition("%")[0], str(end[0]).partition("%")[0])
        if family == socket.AF_INET:
            return route
        if route.own == route.other:  # a server here
            return _Route("127.0.0.1", "127.0.0.1")
    what = f"no IPv4 route leads to {url}, and vLLM's nccl transfer has no other"
    raise ConfigError(what, "generator.urls", given=url, allowed="a server with an IPv4 address")
