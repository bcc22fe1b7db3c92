"""Hosts of their own on one machine: network namespaces with addresses, joined by a bridge."""

import contextlib
import functools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A network namespace with one address; commands started in it see no other network."""

    name: str
    address: str
    link: str
    """Its end of the cable, on the bridge's side."""

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs these words on the host."""
        return ["ip", "netns", "exec", self.name, *words]

    def cut(self) -> None:
        """Pull the cable: packets are lost, no connection is closed."""
        _ip("link", "set", self.link, "down")

    def restore(self) -> None:
        _ip("link", "set", self.link, "up")


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts 10.77.0.1, .2, ...; gone at the end of the block, with everything that still runs in them."""
    # Names of interfaces are global and at most 15 letters long; tests may run side by side.
    prefix = f"b{os.getpid()}"
    bridge = f"{prefix}br"
    made = [
        Host(name=f"{prefix}{n}", address=f"10.77.0.{n}", link=f"{prefix}v{n}") for n in range(1, count + 1)
    ]
    _remove(made, bridge)
    try:
        _ip("link", "add", bridge, "type", "bridge")
        _ip("link", "set", bridge, "up")
        for host in made:
            inside = f"{host.link}i"
            _ip("netns", "add", host.name)
            _ip("link", "add", host.link, "type", "veth", "peer", "name", inside)
            _ip("link", "set", inside, "netns", host.name)
            _ip("link", "set", host.link, "master", bridge, "up")
            _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", inside)
            _ip("-n", host.name, "link", "set", inside, "up")
            _ip("-n", host.name, "link", "set", "lo", "up")
        yield made
    finally:
        _remove(made, bridge)


def need_hosts() -> None:
    """Skip a test where this machine does not allow network namespaces and bridges."""
    if not _can_make_hosts():
        pytest.skip("needs network namespaces: root and iproute2")


@functools.cache
def _can_make_hosts() -> bool:
    if shutil.which("ip") is None:
        return False
    try:
        with hosts(1):
            return True
    except subprocess.CalledProcessError:
        return False


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _remove(made: Sequence[Host], bridge: str) -> None:
    for host in made:
        found = subprocess.run(
            ["ip", "netns", "pids", host.name], capture_output=True, text=True, check=False
        )
        for pid in found.stdout.split():
            subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
        for words in (("netns", "del", host.name), ("link", "del", host.link)):
            subprocess.run(["ip", *words], check=False, capture_output=True)
    subprocess.run(["ip", "link", "del", bridge], check=False, capture_output=True)
