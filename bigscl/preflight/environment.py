"""Check that this environment, and every node of a launcher, can train."""

import contextlib
import importlib.util
import json
import os
import platform
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bigscl.common.failures import exit_now
from bigscl.common.files import free_bytes, machine_ram_bytes
from bigscl.common.text import size
from bigscl.distributed.ranks import address_of_ranks, choose_interface, process_group
from bigscl.store import StorageOptions, StoreError, Transport, check_creates_once, open_backend
from bigscl.training.accelerator import usable_precision

NEEDED = ("bigscl", "torch", "torchvision", "accelerate", "zarr", "obstore", "numpy", "webdataset")
OPTIONAL = {
    "timm": "timm backbones",
    "sklearn": "quickstart",
    "tensorboard": "tracking",
    "pyarrow": ".parquet",
}
TIMEOUT_MINUTES = 1.0
"""How long a process waits for the others; a run waits for `hardware.timeout_minutes`."""
CONNECT_SECONDS = 90.0
"""How long a process tries to connect to all others, which have started before that."""
# Loader workers send their batches through it.
LITTLE_SHARED_MEMORY = 2**30


def check_environment(place: str | None, options: StorageOptions) -> dict[str, Any] | None:
    """Return versions, devices and problems of all processes, on rank 0, and whether they share `place`."""
    with _launched_ranks() as ranks:
        mine = _environment(place)
        payloads = ranks.gather(json.dumps(mine).encode())
        sharing = None if place is None else probe_place(place, options, ranks)
        if payloads is None:
            return None
        processes = [json.loads(payload) for payload in payloads]
        return {
            "processes": processes,
            "place": place,
            "sharing": sharing,
            "problems": [*_problems(processes), *(sharing or ())],
        }


@contextmanager
def _launched_ranks() -> Iterator[Transport]:
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 or "RANK" not in os.environ:
        yield process_group()
        return
    choose_interface(TIMEOUT_MINUTES)  # as the trainer does
    # Without a connection between two hosts, gloo itself tries for minutes.
    watch = threading.Timer(CONNECT_SECONDS, _not_connected)
    watch.daemon = True
    watch.start()
    dist.init_process_group("gloo", timeout=timedelta(minutes=TIMEOUT_MINUTES))
    try:
        ranks = process_group()
        ranks.sum([1.0])  # through connections between all of them, not only to the first
        watch.cancel()
        yield ranks
    finally:
        dist.destroy_process_group()


def _not_connected() -> None:
    print(
        f"bigscl preflight: rank {os.environ['RANK']} on {socket.gethostname()}: no connection to all other "
        f"ranks within {CONNECT_SECONDS:.0f} s. Check that no firewall is between the nodes, and that "
        f"GLOO_SOCKET_IFNAME, if set, is the interface that they share.",
        file=sys.stderr,
        flush=True,
    )
    exit_now(1)


def _environment(place: str | None) -> dict[str, Any]:
    devices = [
        {"name": torch.cuda.get_device_name(n), "bytes": torch.cuda.get_device_properties(n).total_memory}
        for n in range(torch.cuda.device_count())
    ]
    available = (dist.is_gloo_available(), dist.is_nccl_available(), dist.is_mpi_available())
    return {
        "host": socket.gethostname(),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "versions": {name: _version(name) for name in NEEDED},
        "optional": {name: importlib.util.find_spec(name) is not None for name in OPTIONAL},
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "ram_bytes": machine_ram_bytes(),
        "shared_memory_bytes": free_bytes("/dev/shm") if Path("/dev/shm").exists() else None,
        "cuda": torch.version.cuda if torch.cuda.is_available() else None,
        "devices": devices,
        # It takes seconds, so one process per node tries it.
        "bf16": _bf16() if os.environ.get("LOCAL_RANK", "0") == "0" else None,
        "backends": dict(zip(("gloo", "nccl", "mpi"), available, strict=True)),
        "free_bytes": None if place is None else free_bytes(place),
        "launched": "WORLD_SIZE" in os.environ,
        "address": address_of_ranks(),
        "timeout_minutes": _timeout_minutes(),
        "accelerate": any(name.startswith("ACCELERATE_") for name in os.environ),
    }


def _timeout_minutes() -> float | None:
    """Return how long the group of the ranks really waits; None without one."""
    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        return None
    # Not public in torch; without it a group that ignores its timeout could not be told.
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return None if timeout is None else float(timeout.total_seconds() / 60)


def _bf16() -> bool:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported())
    return usable_precision("bf16", device) == "bf16"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _problems(processes: list[dict[str, Any]]) -> Iterator[str]:
    for name in NEEDED:
        versions = {process["versions"][name] for process in processes}
        if None in versions:
            hosts = sorted({process["host"] for process in processes if process["versions"][name] is None})
            yield f"{name} is not installed on {', '.join(hosts)}: pip install {name}"
        elif len(versions) > 1:
            yield f"{name} has several versions: {', '.join(sorted(versions))}. Install the same everywhere."
    if len({process["python"] for process in processes}) > 1:
        yield f"several versions of Python: {', '.join(sorted({process['python'] for process in processes}))}"
    for host, process in {process["host"]: process for process in processes}.items():
        yield from _problems_of_host(host, process)
    if len({process["host"] for process in processes}) > 1:
        yield from _problems_between_hosts(processes)
    if len(processes) == 1 and processes[0]["accelerate"] and not processes[0]["launched"]:
        yield (
            "accelerate started one process only. On CPUs `--cpu --num_processes 2` does that: use "
            "ACCELERATE_USE_CPU=true accelerate launch --multi_gpu --num_processes 2"
        )


def _problems_of_host(host: str, one: dict[str, Any]) -> Iterator[str]:
    if not one["backends"]["gloo"]:
        yield f"{host}: torch has no gloo, which the ranks communicate with. Install another build of torch."
    if one["devices"] and not one["backends"]["nccl"]:
        yield f"{host}: has GPUs, but torch has no nccl. Install another build of torch."
    shared = one["shared_memory_bytes"]
    if shared is not None and shared < LITTLE_SHARED_MEMORY:
        yield f"{host}: {size(shared)} free in /dev/shm: loader workers may die. In Docker: --shm-size 8g."


def _problems_between_hosts(processes: list[dict[str, Any]]) -> Iterator[str]:
    if loopback := sorted({one["host"] for one in processes if (one["address"] or "").startswith("127.")}):
        yield (
            f"ranks on {', '.join(loopback)} listen on the loopback address only, which other nodes cannot "
            f"reach: set GLOO_SOCKET_IFNAME to the interface that they share"
        )
    for process in processes:
        if process["timeout_minutes"] not in (None, TIMEOUT_MINUTES):
            yield (
                f"{process['host']}: the ranks' group waits for {process['timeout_minutes']:g} minutes, "
                f"asked for were {TIMEOUT_MINUTES:g}: this build of torch ignores hardware.timeout_minutes"
            )
            break


def environment_text(facts: dict[str, Any]) -> str:
    processes = facts["processes"]
    hosts: dict[str, list[dict[str, Any]]] = {}
    for process in processes:
        hosts.setdefault(process["host"], []).append(process)
    first = processes[0]
    packages = ", ".join(f"{name} {number}" for name, number in first["versions"].items())
    extras = ", ".join(
        f"{name} {'yes' if first['optional'][name] else 'no'} ({use})" for name, use in OPTIONAL.items()
    )
    lines = [
        f"python {first['python']}, {packages}",
        f"optional: {extras}",
        f"world size {len(processes)}{'' if first['launched'] else ' (not under a launcher)'}",
        *(_host_text(host, ones) for host, ones in hosts.items()),
    ]
    if facts["place"] is not None:
        free = "" if first["free_bytes"] is None else f", {size(first['free_bytes'])} free"
        seen = "the same for all processes" if not facts["sharing"] else "NOT usable for a store"
        lines.append(f"{facts['place']}: {seen}{free}")
    lines += [f"problem: {problem}" for problem in facts["problems"]] or ["all is well"]
    return "\n".join(lines)


def _host_text(host: str, processes: list[dict[str, Any]]) -> str:
    first = processes[0]
    devices = [f"{device['name']} ({size(device['bytes'])})" for device in first["devices"]] or ["no GPU"]
    backends = ", ".join(name for name, there in first["backends"].items() if there)
    cuda = "" if first["cuda"] is None else f", CUDA {first['cuda']}"
    precision = "bf16 works" if first["bf16"] else "bf16 does not work"
    return (
        f"{host}: {len(processes)} x process, {first['cpus']} CPUs, {size(first['ram_bytes'])} RAM, "
        f"{', '.join(devices)}{cuda}, {precision}, backends {backends}"
        f"{'' if first['address'] is None else ', ranks at ' + first['address']}; {first['system']}"
    )


# One place for all processes

# A network file system may show a new file to other nodes only after some seconds.
PATIENCE_SECONDS = 10.0


def probe_place(
    place: str, options: StorageOptions, ranks: Transport, *, patience_seconds: float = PATIENCE_SECONDS
) -> list[str] | None:
    """Return what is wrong with a place, on rank 0 (None elsewhere).

    Every process creates a file there and all read it; every process renames another file over its own and
    all read it again. Files and folders made for this are deleted again.
    """
    token = ranks.broadcast(uuid.uuid4().hex.encode() if ranks.rank == 0 else None).decode()
    key = f"bigscl-preflight-{token}"
    own = f"{key}-{ranks.rank}"
    path = Path(place).absolute()
    # The folders that writing will create, the innermost first.
    parents = () if "://" in place else (path, *path.parents)
    missing = [folder for folder in parents if not folder.exists()]
    _shared(ranks, None)

    def without(content: bytes, from_ranks: list[int]) -> list[int]:
        """Return the ranks whose file does not get this content before long."""
        deadline = time.monotonic() + patience_seconds
        return [rank for rank in from_ranks if not _sees(place, options, f"{key}-{rank}", content, deadline)]

    old, new = f"{token} old".encode(), f"{token} new".encode()
    failures = _shared(ranks, _write(place, options, own, old))
    unseen = without(old, _able(failures))
    all_unseen = _shared(ranks, unseen)
    if failures[ranks.rank] is None:
        failures[ranks.rank] = _write(place, options, own, new, over=True)
    failures = _shared(ranks, failures[ranks.rank])
    all_stale = _shared(ranks, without(new, [rank for rank in _able(failures) if rank not in unseen]))
    with contextlib.suppress(Exception):  # without permission to write there is none to delete
        open_backend(place, options).delete(own)
    _shared(ranks, None)  # all have read
    with contextlib.suppress(OSError):  # the first rank of a node deletes it
        for folder in missing:
            folder.rmdir()
    return list(_place_problems(place, failures, all_unseen, all_stale)) if ranks.rank == 0 else None


def _shared(ranks: Transport, mine: Any) -> list[Any]:
    """Return the values of all ranks in rank order, on every rank."""
    payloads = ranks.gather(json.dumps(mine).encode())
    values = None if payloads is None else json.dumps([json.loads(payload) for payload in payloads]).encode()
    shared: list[Any] = json.loads(ranks.broadcast(values))
    return shared


def _able(failures: list[str | None]) -> list[int]:
    return [rank for rank, failure in enumerate(failures) if failure is None]


def _write(
    place: str, options: StorageOptions, key: str, content: bytes, *, over: bool = False
) -> str | None:
    """Return why this process cannot create a file there, or rename one over it; None if it can."""
    try:
        backend = open_backend(place, options)
        if over:
            backend.replace(key, content)
        else:
            check_creates_once(backend)
            backend.create(key, content)
    except (StoreError, OSError) as error:
        return str(error)
    except Exception as error:  # the errors of object stores have no common type
        return f"{type(error).__name__}: {error}"
    return None


def _sees(place: str, options: StorageOptions, key: str, content: bytes, deadline: float) -> bool:
    while True:
        try:
            if open_backend(place, options).read(key) == content:
                return True
        except Exception:  # reported already by the process that tried to write there
            return False
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def _place_problems(
    place: str, failures: list[str | None], all_unseen: list[list[int]], all_stale: list[list[int]]
) -> Iterator[str]:
    for rank, failure in enumerate(failures):
        if failure is not None:
            yield f"rank {rank} cannot write to {place}: {failure}"
    for rank, unseen in enumerate(all_unseen):
        if unseen:
            yield (
                f"rank {rank} does not see what ranks {unseen} wrote to {place}: it is not the same place "
                f"there. Use a shared file system or an object store."
            )
    for rank, stale in enumerate(all_stale):
        if stale:
            yield (
                f"rank {rank} still reads the old content of files in {place} that ranks {stale} renamed "
                f"others over: a cache there is not shared. Mount it without one, or use an object store."
            )
