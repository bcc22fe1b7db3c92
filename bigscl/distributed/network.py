"""The network interface that the ranks of several nodes talk through on the host."""

import fcntl
import ipaddress
import logging
import os
import socket
import struct
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

logger = logging.getLogger(__name__)

INTERFACE = "GLOO_SOCKET_IFNAME"
SIOCGIFADDR = 0x8915
"""Linux: the IPv4 address of an interface."""


_meeting: list[object] = []
"""The store through which ranks of several nodes met. Rank 0 may serve it: the group needs it, too."""


def choose_interface(timeout_minutes: float = 30.0) -> None:
    """Make gloo use the interface that routes to the master, unless GLOO_SOCKET_IFNAME names one.

    By itself gloo binds to the address of the host name. Where that is 127.0.0.1 or 127.0.1.1, as Debian and
    many container images have it, nodes cannot reach each other. All ranks call this before they join.
    """
    spans_nodes = os.environ.get("LOCAL_WORLD_SIZE") != os.environ.get("WORLD_SIZE")
    master = os.environ.get("MASTER_ADDR")
    if not spans_nodes or master is None or INTERFACE in os.environ or dist.is_initialized():
        return
    name = _interface_for_ranks(master, timedelta(minutes=timeout_minutes))
    if name is not None:
        os.environ[INTERFACE] = name
        logger.info("ranks of other nodes are reached through %s (set %s to change it)", name, INTERFACE)


def _interface_for_ranks(master: str, timeout: timedelta) -> str | None:
    """Return the interface towards the master; on its own node, that of the address other nodes know."""
    store, rank, world_size = next(rendezvous("env://", timeout=timeout))
    _meeting.append(store)
    name = interface_towards(master)
    store.set(f"bigscl/master/{rank}", "" if name is None else _resolve(master)[1][0])
    if name is not None:
        return name
    addresses = (store.get(f"bigscl/master/{other}").decode() for other in range(world_size))
    known = next(filter(None, addresses), None)
    return None if known is None else _interface_with(known)


def address_of_ranks() -> str | None:
    """The IPv4 address that gloo listens on under a launcher; None if it cannot be told, or without one."""
    if "MASTER_ADDR" not in os.environ:
        return None
    try:
        if (name := os.environ.get(INTERFACE)) is not None:
            return next(iter(sorted(addresses_of(name.split(",")[0]))), None)
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def interface_towards(host: str) -> str | None:
    """The interface through which this machine reaches a host; None for the loopback, or if it cannot."""
    try:
        family, address = _resolve(host)
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing: it only looks up the route
            ours = probe.getsockname()[0]
    except OSError:
        return None
    if ipaddress.ip_address(ours.partition("%")[0]).is_loopback:
        return None
    return _interface_with(ours)


def _resolve(host: str) -> tuple[int, Any]:
    family, _, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    return family, address


def _interface_with(address: str) -> str | None:
    return next((name for _, name in socket.if_nameindex() if address in addresses_of(name)), None)


def addresses_of(interface: str) -> set[str]:
    addresses = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("256s", interface.encode()[:15]))
            addresses.add(socket.inet_ntoa(answer[20:24]))
        except OSError:
            pass  # it has no IPv4 address
    try:
        with open("/proc/net/if_inet6") as lines:
            rows = [line.split() for line in lines]
    except OSError:
        return addresses
    return addresses | {
        str(ipaddress.IPv6Address(bytes.fromhex(row[0]))) for row in rows if row[-1] == interface
    }
