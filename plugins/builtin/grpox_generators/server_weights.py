"""Sends a policy's weights to vLLM servers: through files that both sides see, or by vLLM's nccl backend."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from grpox.contracts import WeightStream
from grpox.errors import RunFailed
from grpox.toolkit import base_buffers, base_parameters
from grpox_generators.server_fleet import Fleet
from grpox_generators.stored_names import as_stored

Bucket = dict[str, torch.Tensor]


class FileSender:
    """Bucket by bucket: the next is gathered and written while the servers load the one before."""

    def __init__(self, fleet: Fleet, bucket_bytes: int) -> None:
        self._fleet = fleet
        self._bucket_bytes = bucket_bytes
        self._written: list[Path] = []
        # Two runs that use one server by mistake must not write into each other's files.
        self._names = (f"{secrets.token_hex(4)}-{number:06d}.safetensors" for number in itertools.count())

    def send(self, weights: WeightStream) -> None:
        """Replace the weights of all servers in use; one that fails is given up by the fleet.

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
                loading.cancel()  # after an interrupt; else it has ended
            for file in self._written:
                file.unlink(missing_ok=True)
        fleet.post("/finish_weight_update", {"weight_version": None})

    def close(self) -> None:
        """Nothing is held."""

    def _write(self, bucket: Bucket, name: str) -> None:
        """Into every server's folder, once for each file system."""
        first: Path | None = None
        for url, about in list(self._fleet.abouts.items()):
            folder = Path(about["weights_folder"])
            file = folder / name
            self._written.append(file)
            try:
                _save(bucket, file, first)
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
            # A server that loaded it still has it mapped until its layers are complete.
            Path(about["weights_folder"], name).unlink(missing_ok=True)


class NcclSender:
    """vLLM's own transfer between GPUs: this process is rank 0 of a group with all workers of all servers."""

    def __init__(self, fleet: Fleet, policy: Any) -> None:
        self._fleet = fleet
        self._source = _StreamSource(policy)
        self._engine: Any = None
        self._group: tuple[str, ...] = ()

    def send(self, weights: WeightStream) -> None:
        """Replace the weights of all servers in use."""
        group = tuple(about["instance"] for about in self._fleet.abouts.values())
        if group != self._group:
            self._join(group)
        self._source.weights = weights
        self._engine.send_weights()

    def close(self) -> None:
        """Leave the group."""
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _join(self, group: tuple[str, ...]) -> None:
        from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
        from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

        if self._engine is not None:
            self.close()
            self._fleet.post("/shutdown_weight_transfer_engine")
        with socket.socket() as probe:
            probe.bind(("", 0))
            port = probe.getsockname()[1]
        workers = sum(about["world_size"] for about in self._fleet.abouts.values())
        self._engine = WeightTransferTrainerFactory.trainer_init(
            NCCLTrainerInitInfo(
                master_address=_address_seen_by(next(iter(self._fleet.abouts))),
                master_port=port,
                world_size=1 + workers,
                rank=0,
            ),
            client=_WeightRoutes(self._fleet),
            source=self._source,
        )
        self._group = group


class _WeightRoutes:
    """Routes that vLLM's trainer side calls, called on all servers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

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
        """The group cannot go on without one of its members."""
        members = list(self._fleet.abouts)
        self._fleet.loop.run(self._fleet.post_each(path, bodies))
        if list(self._fleet.abouts) != members:
            raise RunFailed(f"a vLLM server was lost while it received weights by nccl: {self._fleet.lost}")


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


def _save(bucket: Bucket, file: Path, same: Path | None) -> None:
    """Write `bucket`; `same`, where given, is a file that holds it already, perhaps on the same file system."""
    if same is None:
        save_file(bucket, file)
        return
    try:
        os.link(same, file)
    except OSError:
        shutil.copyfile(same, file)


def buckets(weights: WeightStream, limit: int) -> Iterator[Bucket]:
    """Parameters together up to `limit` bytes; a larger one by itself."""
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


def _address_seen_by(url: str) -> str:
    """This host's address on the way to a server; nothing is sent."""
    parts = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        address: str = probe.getsockname()[0]
    return address
