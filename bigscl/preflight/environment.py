"""Check that this environment, and every node of a launcher, can train."""

import importlib.util
import json
import os
import platform
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bigscl.common.failures import exit_now
from bigscl.common.files import free_bytes
from bigscl.common.text import size
from bigscl.preflight.shared_storage import probe_place
from bigscl.store import StorageOptions, Transport

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
    """Return versions, devices and problems of all processes of the launcher, on rank 0 (None elsewhere).

    They also check that all of them share `place`.
    """
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
    """Yield the processes of the launcher as one group, or this process alone."""
    import torch.distributed as dist

    from bigscl.distributed.network import choose_interface
    from bigscl.distributed.ranks import process_group

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
    """Return what one process finds on its machine."""
    import torch
    import torch.distributed as dist

    from bigscl.distributed.hardware import machine_ram_bytes
    from bigscl.distributed.network import address_of_ranks

    devices = [
        {"name": torch.cuda.get_device_name(n), "bytes": torch.cuda.get_device_properties(n).total_memory}
        for n in range(torch.cuda.device_count())
    ]
    backends = {
        "gloo": dist.is_gloo_available(),
        "nccl": dist.is_nccl_available(),
        "mpi": dist.is_mpi_available(),
    }
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
        "backends": backends,
        "free_bytes": None if place is None else free_bytes(place),
        "launched": "WORLD_SIZE" in os.environ,
        "address": address_of_ranks(),
        "timeout_minutes": _timeout_minutes(),
        "accelerate": any(name.startswith("ACCELERATE_") for name in os.environ),
    }


def _timeout_minutes() -> float | None:
    """Return how long the group of the ranks really waits; None without one."""
    import torch
    import torch.distributed as dist

    group = dist.group.WORLD if dist.is_initialized() else None
    if group is None:
        return None
    # Not public in torch; without it a group that ignores its timeout could not be told.
    options = getattr(group._get_backend(torch.device("cpu")), "options", None)
    timeout = getattr(options, "_timeout", None)
    return None if timeout is None else float(timeout.total_seconds() / 60)


def _bf16() -> bool:
    import torch

    from bigscl.distributed.hardware import usable_precision

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
    """Yield what is wrong with each process, and with all of them together."""
    for name in NEEDED:
        found = {one["versions"][name] for one in processes}
        if None in found:
            hosts = sorted({one["host"] for one in processes if one["versions"][name] is None})
            yield f"{name} is not installed on {', '.join(hosts)}: pip install {name}"
        elif len(found) > 1:
            yield f"{name} has several versions: {', '.join(sorted(found))}. Install the same everywhere."
    if len({one["python"] for one in processes}) > 1:
        yield f"several versions of Python: {', '.join(sorted({one['python'] for one in processes}))}"
    for host, one in {one["host"]: one for one in processes}.items():
        yield from _problems_of_host(host, one)
    if len({one["host"] for one in processes}) > 1:
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
    loopback = sorted({one["host"] for one in processes if (one["address"] or "").startswith("127.")})
    if loopback:
        yield (
            f"ranks on {', '.join(loopback)} listen on the loopback address only, which other nodes cannot "
            f"reach: set GLOO_SOCKET_IFNAME to the interface that they share"
        )
    for one in processes:
        if one["timeout_minutes"] not in (None, TIMEOUT_MINUTES):
            yield (
                f"{one['host']}: the ranks' group waits for {one['timeout_minutes']:g} minutes, asked for "
                f"were {TIMEOUT_MINUTES:g}: this build of torch ignores hardware.timeout_minutes"
            )
            break


def environment_text(facts: dict[str, Any]) -> str:
    processes = facts["processes"]
    hosts: dict[str, list[dict[str, Any]]] = {}
    for one in processes:
        hosts.setdefault(one["host"], []).append(one)
    first = processes[0]
    packages = ", ".join(f"{name} {found}" for name, found in first["versions"].items())
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
    one = processes[0]
    devices = [f"{device['name']} ({size(device['bytes'])})" for device in one["devices"]] or ["no GPU"]
    backends = ", ".join(name for name, there in one["backends"].items() if there)
    cuda = "" if one["cuda"] is None else f", CUDA {one['cuda']}"
    precision = "bf16 works" if one["bf16"] else "bf16 does not work"
    return (
        f"{host}: {len(processes)} x process, {one['cpus']} CPUs, {size(one['ram_bytes'])} RAM, "
        f"{', '.join(devices)}{cuda}, {precision}, backends {backends}"
        f"{'' if one['address'] is None else ', ranks at ' + one['address']}; {one['system']}"
    )
