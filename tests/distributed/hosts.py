"""Hosts of their own on one machine: network namespaces with addresses and names, joined by a bridge.

As on Debian, a host's own /etc/hosts maps its name to 127.0.1.1; the others know its address.
"""

import contextlib
import ctypes
import functools
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.fork_server import run_module

INTERFACE = "eth0"
"""The only one of each host, but for the loopback."""
# A closed port: an answer that refuses the connection is an answer.
PROBE = """
import socket, sys
try:
    socket.create_connection((sys.argv[1], 9), timeout=2)
except ConnectionRefusedError:
    pass
"""
ENTER = 'mount --bind "$0" /etc/hosts && echo "$1" > /proc/sys/kernel/hostname && shift && exec "$@"'


# Of linux/sched.h.
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """A network namespace with one address; commands started in it see no other network."""

    name: str
    address: str
    names: Path
    """Its /etc/hosts."""
    bridge: str
    """The namespace of the bridge, in which its end of the cable has the host's name."""

    def command(self, words: Sequence[str]) -> list[str]:
        """The command line that runs these words on the host."""
        own = ["unshare", "--mount", "--uts", "sh", "-c", ENTER, str(self.names), self.name]
        # Not `ip netns exec`, which hides /sys/fs/cgroup.
        return ["nsenter", f"--net=/run/netns/{self.name}", *own, *words]

    def enter(self) -> None:
        """Make this process, and what it starts from now on, one of the host's, as `command` does."""
        libc = ctypes.CDLL(None, use_errno=True)
        with open(f"/run/netns/{self.name}") as space:
            done = libc.setns(space.fileno(), CLONE_NEWNET) or libc.unshare(CLONE_NEWNS | CLONE_NEWUTS)
        if done:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["mount", "--bind", str(self.names), "/etc/hosts"], check=True)
        socket.sethostname(self.name)

    def reaches(self, address: str) -> bool:
        """Whether packets pass from here to an address, and back."""
        words = self.command([sys.executable, "-c", PROBE, address])
        return subprocess.run(words, capture_output=True, check=False).returncode == 0

    def cut(self) -> None:
        """Pull the cable: packets are lost, no connection is closed."""
        _ip("-n", self.bridge, "link", "set", self.name, "down")

    def restore(self) -> None:
        _ip("-n", self.bridge, "link", "set", self.name, "up")


def run_on(name: str, names: str, module: str, *words: str) -> None:
    """Do what `python -m module words` does on a host, in a fork of the server."""
    Host(name=name, address="", names=Path(names), bridge="").enter()
    run_module(module, *words)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Hosts 192.168.77.1, .2, ...; gone at the end of the block, with everything that still runs in them."""
    # Names of interfaces are at most 15 letters long; tests may run side by side.
    prefix = f"b{os.getpid()}"
    # In a namespace of its own the bridge meets no firewall and no address of the machine.
    bridge = f"{prefix}b"
    # Of two ranks, gloo's with the lower address is called by the other: a first node on 127.0.1.1 would be.
    with tempfile.TemporaryDirectory() as folder:
        made = [
            Host(name=f"{prefix}h{n}", address=f"192.168.77.{n}", names=Path(folder, str(n)), bridge=bridge)
            for n in range(1, count + 1)
        ]
        _remove(made, bridge)
        try:
            _ip("netns", "add", bridge)
            _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
            _ip("-n", bridge, "link", "set", "bridge", "up")
            for host in made:
                _connect(host)
                known = [(other.address if other != host else "127.0.1.1", other.name) for other in made]
                lines = [" ".join(pair) for pair in (("127.0.0.1", "localhost"), *known)]
                host.names.write_text("\n".join(lines) + "\n")
            yield made
        finally:
            _remove(made, bridge)


def _connect(host: Host) -> None:
    ends = (host.name, "netns", host.bridge), ("name", INTERFACE, "netns", host.name)
    _ip("netns", "add", host.name)
    _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
    _ip("-n", host.bridge, "link", "set", host.name, "master", "bridge", "up")
    _ip("-n", host.name, "addr", "add", f"{host.address}/24", "dev", INTERFACE)
    _ip("-n", host.name, "link", "set", INTERFACE, "up")
    _ip("-n", host.name, "link", "set", "lo", "up")


def need_hosts() -> None:
    """Skip a test where this machine has no network namespaces, or none that pass packets to each other."""
    if (reason := _missing()) is not None:
        pytest.skip(reason)


@functools.cache
def _missing() -> str | None:
    if shutil.which("ip") is None or shutil.which("unshare") is None:
        return "needs network namespaces: iproute2 and util-linux are not installed"
    try:
        with hosts(2) as (one, other):
            if one.reaches(other.address) and other.reaches(one.address):
                return None
            return "needs network namespaces that pass packets to each other"
    except subprocess.CalledProcessError as error:
        return f"needs network namespaces: {error.stderr.decode(errors='replace').strip()}"


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def _remove(made: Sequence[Host], bridge: str) -> None:
    for name in (*(host.name for host in made), bridge):
        found = subprocess.run(["ip", "netns", "pids", name], capture_output=True, text=True, check=False)
        for pid in found.stdout.split():
            subprocess.run(["kill", "-9", pid], check=False, capture_output=True)
        subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)
