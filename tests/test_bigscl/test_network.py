"""The interface that routes to the master is found, and only asked for where ranks span nodes."""

import socket
import subprocess
import sys

import pytest

from bigscl.processes.network import INTERFACE, addresses_of, choose_interface, interface_towards
from tests.distributed.hosts import hosts, need_hosts


def test_the_loopback_is_no_interface_towards_other_nodes():
    assert interface_towards("127.0.0.1") is None
    assert interface_towards("localhost") is None


def test_a_host_that_cannot_be_resolved_or_reached_has_no_interface():
    assert interface_towards("no-such-host.invalid") is None


def test_addresses_of_the_loopback():
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    assert "127.0.0.1" in addresses_of(names[0])


def test_the_interface_of_a_host_is_the_one_with_the_route():
    need_hosts()

    code = "import sys; from bigscl.processes.network import interface_towards as f; print(f(sys.argv[1]))"
    with hosts(2) as (one, other):
        for target in (one.address, other.address):
            found = subprocess.run(
                one.command([sys.executable, "-c", code, target]), capture_output=True, text=True, check=True
            )
            assert found.stdout.strip() == f"{one.link}i"


@pytest.mark.parametrize(
    ("environment", "asked"),
    [
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", INTERFACE: "mine"}, False),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, True),
        ({}, False),
    ],
)
def test_only_ranks_on_several_nodes_without_a_chosen_interface_look_for_one(monkeypatch, environment, asked):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", INTERFACE):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "192.0.2.1")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    found = []
    monkeypatch.setattr("bigscl.processes.network.interface_towards", lambda host: found.append(host))
    choose_interface()
    assert found == (["192.0.2.1"] if asked else [])
