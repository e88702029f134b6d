"""Sends a policy's weights to vLLM servers through files that both sides see."""

from __future__ import annotations

import itertools
import os
import secrets
import shutil
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from grpox.contracts import WeightStream
from grpox.errors import RunFailed
from grpox_generators.server_fleet import Fleet

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
            # A server that has loaded the file keeps it mapped until its layers are complete.
            Path(about["weights_folder"], name).unlink(missing_ok=True)


def _save(bucket: Bucket, file: Path, same: Path | None) -> None:
    """Write `bucket`, or link or copy `same`, a file that already has the same content."""
    if same is None:
        save_file(bucket, file)
        return
    try:
        os.link(same, file)
    except OSError:
        shutil.copyfile(same, file)


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
