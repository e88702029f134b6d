"""The processes of a run: rendezvous, rank, size, device, and the few collectives that the core needs.

Processes listen only on the interfaces that they need. By default, gloo listens on the interface of the
host's name, and torch's TCPStore on all interfaces. On many machines the host's name means loopback, which
other machines cannot reach.

Work that each rank does alone fails on all ranks if it fails on one, at the end of the phase: otherwise the
others would wait in their next collective for a rank that has left. A collective that fails because a rank is
lost raises an error that says so, instead of the transport's message.
"""

from __future__ import annotations

import atexit
import errno
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from grpox.errors import ConfigError, GrpoxError, RankLost, RunFailed, describe, text_of
from grpox.runtime import launch
from grpox.runtime.launch import Place
from grpox.runtime.phases import WAITING, PhaseTimes

LOOPBACK = ("lo", "lo0")
"""Names of the loopback interface on Linux and on macOS."""
SECONDS_TO_MEET = 600.0
"""Longest wait of ranks for one another at the start, as in torchrun: machines may start minutes apart."""

Item = TypeVar("Item")
MARKS = ("gloo", "connection closed by peer", "connection reset by peer", "timed out waiting", "nccl")
"""Words in the transports' error messages; gloo raises a plain RuntimeError."""


def name_interface(place: Place) -> None:
    """Choose the interface on which gloo listens, unless the user names one: loopback if all ranks are on this
    machine, so that no other machine can connect; else the interface that leads to rank 0's machine.

    nccl itself finds the fastest interfaces between machines. It gets none here, because weights may go by nccl
    to servers on other machines, even if all ranks are on this one.

    Raises:
        ConfigError: the machine of rank 0 is unknown here, or its name means loopback.
    """
    if launch.on_one_machine():
        names = {name for _, name in socket.if_nameindex()}
        for interface in LOOPBACK:
            if interface in names:
                os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
                # vLLM's engines ask for this address instead.
                os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
    elif "GLOO_SOCKET_IFNAME" not in os.environ and place.address:
        address = _address_towards(place.address)
        for name, addresses in psutil.net_if_addrs().items():
            if any(each.address.partition("%")[0] == address.partition("%")[0] for each in addresses):
                os.environ["GLOO_SOCKET_IFNAME"] = name
                os.environ.setdefault("VLLM_HOST_IP", address)
                break


def meeting_store(place: Place, limit: timedelta) -> TCPStore | None:
    """Open the rendezvous store, on rank 0 at `place`; None if torchrun has already opened one.

    torch's default store listens on all interfaces; this one does so only if the address does not belong to
    this machine, for example behind address translation.

    Args:
        limit: time limit of each wait at the store after the rendezvous.

    Raises:
        ConfigError: the port is in use.
        RunFailed: the ranks did not connect.
    """
    opened_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if opened_by_torchrun or place.address is None or place.port is None:
        return None
    listening = _listening(place.address, place.port) if place.rank == 0 else None
    wait = min(limit, timedelta(seconds=SECONDS_TO_MEET))
    try:
        store = TCPStore(
            place.address, place.port, place.world_size, place.rank == 0, wait, master_listen_fd=listening
        )
    except RuntimeError as error:
        raise not_met(place, error) from error
    store.set_timeout(limit)
    return store


def not_met(place: Place, error: RuntimeError) -> RunFailed:
    """Return the error of a rank that cannot connect to the others."""
    words = " ".join(str(error).split())[:300]
    return RunFailed(
        f"rank {place.rank} of {place.world_size} could not connect to the others at "
        f"{place.address}:{place.port}: check that all ranks are started, and that {socket.gethostname()} can "
        f"reach that address\n    {words}"
    )


def _address_towards(host: str) -> str:
    """Return this machine's address on the route to `host`; nothing is sent."""
    try:
        family, address = _resolved(host, 9)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)
            own: str = probe.getsockname()[0]
    except OSError as error:
        what = f"this machine cannot reach the machine of rank 0: {error.strerror or error}"
        raise ConfigError(what, key="MASTER_ADDR", given=host) from error
    if not _is_loopback(own):
        return own
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    others = [
        each.address
        for name, addresses in psutil.net_if_addrs().items()
        for each in addresses
        if name in up and each.family == socket.AF_INET and not _is_loopback(each.address)
    ]
    if len(others) == 1:
        return str(others[0])
    what = "on rank 0's machine its name means loopback, which other machines cannot reach"
    allowed = f"one of its addresses ({', '.join(others)}), or GLOO_SOCKET_IFNAME with the interface to use"
    raise ConfigError(what, key="MASTER_ADDR", given=host, allowed=allowed)


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _resolved(host: str, port: int) -> tuple[int, Any]:
    """Return family and address of a socket, IPv4 before IPv6; raises OSError if the host is unknown."""
    addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    family, _, _, _, address = min(addresses, key=lambda each: each[0] != socket.AF_INET)
    return family, address


def _listening(host: str, port: int) -> int | None:
    """Return the file descriptor, owned by the store, of a socket that listens only on that address; None if
    the store must listen on all interfaces."""
    try:
        family, address = _resolved(host, port)
        if _is_loopback(str(address[0])) and not launch.on_one_machine():
            return None  # other machines reach this one by another address of that name
        with socket.socket(family) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen(2048)
            return listener.detach()
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            return None
        what = "rank 0 cannot listen on this port: another process uses it"
        allowed = "a free port on that machine"
        raise ConfigError(what, key="MASTER_PORT", given=f"{host}:{port}", allowed=allowed) from error


@dataclass(frozen=True)
class World:
    """This process among the processes of the run."""

    rank: int
    size: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def gather(self, items: Sequence[Item]) -> list[Item]:
        """Return the items of every rank, in rank order, on every rank."""
        if self.size == 1:
            return list(items)
        run_and_gather: list[list[Item]] = [[] for _ in range(self.size)]
        dist.all_gather_object(run_and_gather, list(items))
        return [item for part in run_and_gather for item in part]

    def reduce(self, values: torch.Tensor, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
        """Reduce `values` over the ranks, in place."""
        if self.size > 1:
            dist.all_reduce(values, op=op)
        return values

    def barrier(self) -> None:
        if self.size > 1:
            dist.barrier()


def start_world(timeout: float = 1800.0) -> World:
    """Join (or form) the process group: gloo on CPU, nccl on CUDA.

    The launcher's variables give rank and size (`grpox.runtime.launch`); without a launcher this process is the
    only rank and opens no port. DeepSpeed joins the existing group; if it formed the group itself, it would
    pass a device id, with which weight sync was seen to hang.

    Args:
        timeout: seconds that a collective waits for the other ranks.

    Raises:
        ConfigError: the launcher's variables are incomplete or contradictory, or need more GPUs than exist.
        RunFailed: the ranks did not connect.
    """
    place = launch.resolve_launch()
    # DeepSpeed insists on finding this variable, even without a launcher.
    os.environ.setdefault("LOCAL_RANK", "0")
    device = _device(place)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        # DeepSpeed and vLLM choose the device by this variable.
        os.environ["LOCAL_RANK"] = str(device.index)
    if not dist.is_initialized():
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        limit, size = timedelta(seconds=timeout), place.world_size
        name_interface(place)
        store = HashStore() if size == 1 else meeting_store(place, limit)
        try:
            dist.init_process_group(backend, store=store, rank=place.rank, world_size=size, timeout=limit)
        except RuntimeError as error:
            if size == 1:
                raise
            raise not_met(place, error) from error
        atexit.register(dist.destroy_process_group)
    return World(rank=place.rank, size=place.world_size, device=device)


def _device(place: Place) -> torch.device:
    """Return this rank's GPU by its local rank; or the only visible GPU, as srun may arrange."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if place.local_rank < count:
        return torch.device("cuda", place.local_rank)
    if count == 1 and place.launcher in ("srun", "mpirun"):
        return torch.device("cuda", 0)
    what = f"{place.launcher} started more processes on this machine than there are GPUs"
    given, allowed = str(place.local_rank), f"a number below {count}: one process for each GPU"
    raise ConfigError(what, key="LOCAL_RANK", given=given, allowed=allowed)


def run_and_gather(world: World, times: PhaseTimes, work: Callable[[], Item]) -> list[Item]:
    """Run `work` on every rank and gather the results in rank order; a collective after the work.

    Args:
        work: needs no other rank, or completes its collectives even if it fails.
        times: knows the phase in which the work failed.

    Raises:
        RunFailed: the work failed only on other ranks.
        Exception: the original error, on a rank where the work failed.
    """
    if world.size == 1:
        return [work()]
    done, failure, error = list[Item](), "", None
    try:
        done.append(work())
    except Exception as raised:  # noqa: BLE001 - raised again when the others know
        error = raised
        phase = f" in phase '{times.failed}'" if times.failed != "none" else ""
        failure = f"rank {world.rank} failed{phase}: {describe_failure(raised)}"
    with times.phase(WAITING):
        parts = world.gather([(failure, done)])
    if error is not None:
        raise error
    if failures := [text for text, _ in parts if text]:
        raise RunFailed("\n".join(failures))
    return [item for _, results in parts for item in results]


def on_every_rank(world: World, times: PhaseTimes, work: Callable[[], Item]) -> Item:
    """Return this rank's result of `work`, which need not be picklable; otherwise like `run_and_gather`."""
    if world.size == 1:
        return work()
    own: list[Item] = []
    run_and_gather(world, times, lambda: own.append(work()))
    return own[0]


def describe_failure(error: BaseException) -> str:
    """Return the text of an exception in one or more lines, with its type unless it is written for users."""
    return str(error) if isinstance(error, GrpoxError) else describe(error)


@contextmanager
def translate_lost_ranks(world: World, times: PhaseTimes) -> Iterator[None]:
    """Raise RankLost if a collective within this block loses another rank."""
    try:
        yield
    except RuntimeError as error:
        text = text_of(error)
        is_transport = isinstance(error, dist.DistError) or any(mark in text.lower() for mark in MARKS)
        if world.size == 1 or not is_transport:
            raise
        phase = times.failed if times.failed != "none" else times.now()[0]
        raise RankLost(
            f"rank {world.rank} lost another rank in phase '{phase}': the other rank ended or was too "
            f"late; see its own message for the cause\n    {' '.join(text.split())[:300]}"
        ) from error
