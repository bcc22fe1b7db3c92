"""The ranks of a run as one group on the host: they exchange bytes and small sums without a GPU."""

import atexit
import fcntl
import gc
import io
import ipaddress
import logging
import os
import socket
import struct
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Protocol, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed.rendezvous import rendezvous

from bigscl import store
from bigscl.common.files import explain
from bigscl.store import StoreError, Transport

logger = logging.getLogger(__name__)


class Ranks(Transport, Protocol):
    """A transport that can also sum numbers."""

    wait_seconds: float
    """How long this rank has waited for other ranks in sums."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Return each number summed over the ranks, on every rank."""
        ...

    def start_sum(self, values: Sequence[float]) -> "PendingSum":
        """Start such a sum; call what is returned for the result. All ranks start their sums in one order."""
        ...


PendingSum = Callable[[], list[float]]
"""Waits for a sum that was started, and returns it."""


# Torch before 2.8 frees a group under Python's lock, for which a thread of the group may wait to free its
# last tensor: both hang. A backend frees itself without the lock, if it goes after all that uses it.
_backends: list[object] = []


@atexit.register
def _free_backends() -> None:
    # After an error the group is not destroyed, and would wait for the other ranks.
    if _backends and not dist.is_initialized():
        gc.collect()
        _backends.clear()


# In torch 2.4 the threads of a group, which are outside of inference mode, may not change tensors made in it.
normal_tensors = torch.inference_mode(False)


class GlooRanks:
    """All ranks of the initialised process group, over a gloo group: nothing touches the GPU."""

    def __init__(self, timeout: timedelta | None = None) -> None:
        self.rank = dist.get_rank()
        self.world_size = dist.get_world_size()
        # None is the default group, which has a timeout of its own.
        group = None if dist.get_backend() == "gloo" else dist.new_group(backend="gloo", timeout=timeout)
        self._group = cast(dist.ProcessGroup | None, group)
        used = self._group or dist.group.WORLD
        assert used is not None
        _backends.append(used._get_backend(torch.device("cpu")))
        self.wait_seconds = 0.0

    @normal_tensors
    def gather(self, payload: bytes) -> list[bytes] | None:
        payloads: list[bytes] | None = [b""] * self.world_size if self.rank == 0 else None
        dist.gather_object(payload, payloads, dst=0, group=self._group)
        return payloads

    @normal_tensors
    def broadcast(self, payload: bytes | None) -> bytes:
        box = [payload]
        dist.broadcast_object_list(box, src=0, group=self._group)
        assert box[0] is not None
        return box[0]

    @normal_tensors
    def sum_counts(self, counts: NDArray[np.int64]) -> NDArray[np.int64]:
        totals = torch.from_numpy(counts.copy())
        dist.all_reduce(totals, group=self._group)
        return totals.numpy()

    @normal_tensors
    def exchange(self, payloads: Sequence[bytes]) -> list[bytes]:
        """Send each rank its payload, in rank order; return the payloads for this rank, in rank order."""
        sent = [len(payload) for payload in payloads]
        lengths = torch.empty(self.world_size, dtype=torch.int64)
        dist.all_to_all_single(lengths, torch.tensor(sent), group=self._group)
        came = lengths.tolist()
        outgoing, incoming = (torch.empty(sum(counts), dtype=torch.uint8) for counts in (sent, came))
        np.concatenate([np.frombuffer(payload, np.uint8) for payload in payloads], out=outgoing.numpy())
        dist.all_to_all_single(incoming, outgoing, came, sent, group=self._group)
        return [part.tobytes() for part in np.split(incoming.numpy(), np.cumsum(came)[:-1])]

    def sum(self, values: Sequence[float]) -> list[float]:
        return self.start_sum(values)()

    @normal_tensors
    def start_sum(self, values: Sequence[float]) -> PendingSum:
        # float64 holds every count exactly.
        totals = torch.tensor(values, dtype=torch.float64)
        work = dist.all_reduce(totals, group=self._group, async_op=True)
        assert work is not None

        def wait() -> list[float]:
            asked = time.perf_counter()
            work.wait()
            self.wait_seconds += time.perf_counter() - asked
            return cast(list[float], totals.tolist())

        return wait


def pack_arrays(arrays: Mapping[str, NDArray[Any]]) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)  # type: ignore[arg-type]  # to mypy an array may be its option
    return file.getvalue()


def unpack_arrays(payload: bytes) -> dict[str, NDArray[Any]]:
    with np.load(io.BytesIO(payload), allow_pickle=False) as arrays:
        return dict(arrays)


class SingleProcess(store.SingleProcess):
    """The group of one process."""

    wait_seconds = 0.0

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def start_sum(self, values: Sequence[float]) -> PendingSum:
        return lambda: list(values)


def process_group(timeout_minutes: float | None = None) -> Ranks:
    """Return all ranks of torch.distributed, which wait for each other up to the timeout, or this process."""
    if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
        return GlooRanks(None if timeout_minutes is None else timedelta(minutes=timeout_minutes))
    return SingleProcess()


def failure_on_any(ranks: Ranks, action: Callable[[], object]) -> str:
    """Run the action on every rank; return the first expected failure (store, value, file) on every rank."""
    reason = ""
    try:
        action()
    except (StoreError, ValueError) as error:
        reason = str(error)
    except OSError as error:
        reason = explain(error) or f"{type(error).__name__}: {error}"
    reports, answer = ranks.gather(reason.encode()), None
    if reports is not None:
        rank, first = next(((rank, report) for rank, report in enumerate(reports) if report), (0, b""))
        answer = first + (f" (on rank {rank})".encode() if rank else b"")
    return ranks.broadcast(answer).decode()


# The network interface that the ranks of several nodes talk through on the host

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
