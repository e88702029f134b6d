"""On which addresses a process and all below it listen."""

from __future__ import annotations

import ipaddress

import psutil


def listening(pid: int) -> set[str]:
    """Return the addresses on which a process and all below it listen now, by TCP or UDP."""
    found = set()
    try:
        everyone = [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return set()
    for process in everyone:
        try:
            sockets = process.net_connections("inet")
        except psutil.Error:  # it has ended
            continue
        for each in sockets:
            if each.laddr and (each.status == psutil.CONN_LISTEN or (each.status == "NONE" and not each.raddr)):
                found.add(each.laddr.ip)
    return found


def beyond_loopback(addresses: set[str]) -> set[str]:
    """Return those that other machines may reach."""
    return {address for address in addresses if not ipaddress.ip_address(address).is_loopback}
