"""Where the ranks of one machine listen for one another: on loopback, which no other machine reaches.

Left alone, gloo and nccl listen on the interface of the host's name, and torch's TCPStore on all of them.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from grpox import launch

INTERFACES = ("lo", "lo0")
"""What loopback is called on Linux and on macOS."""
VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")


def keep_to_loopback() -> None:
    """Have gloo and nccl listen there if all ranks are on this machine and the user names no interface."""
    if not launch.on_one_machine():
        return
    names = {name for _, name in socket.if_nameindex()}
    for interface in INTERFACES:
        if interface in names:
            for variable in VARIABLES:
                os.environ.setdefault(variable, interface)
            # vLLM's engines ask for this address instead.
            os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")


def loopback_store(rank: int, size: int, timeout: timedelta) -> TCPStore | None:
    """The store through which ranks meet, where rank 0 is to open it and MASTER_ADDR is loopback; else None.

    torch's own would listen on all interfaces; torchrun opens one itself, before this process exists.
    """
    host, port = os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", "")
    opened_by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    if opened_by_torchrun or not port.isdecimal() or not _is_loopback(host):
        return None
    listening = _listening(host, int(port)) if rank == 0 else None
    return TCPStore(host, int(port), size, rank == 0, timeout, master_listen_fd=listening)


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(socket.gethostbyname(host)).is_loopback
    except (OSError, ValueError):
        return False


def _listening(host: str, port: int) -> int:
    """A socket that listens there, as a file descriptor that is the store's from now on."""
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(2048)
        return listener.detach()
