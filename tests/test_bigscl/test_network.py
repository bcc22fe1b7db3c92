"""The interface that routes to the master is found, and only asked for where ranks span nodes."""

import os
import socket
import subprocess
import sys

import pytest
from torch.distributed import HashStore

from bigscl.distributed import ranks as network
from bigscl.distributed.ranks import INTERFACE, addresses_of, choose_interface, interface_towards
from tests.distributed.hosts import hosts, need_hosts


def test_the_loopback_is_no_interface_towards_other_nodes():
    assert interface_towards("127.0.0.1") is None
    assert interface_towards("localhost") is None


def test_a_host_that_cannot_be_resolved_or_reached_has_no_interface():
    assert interface_towards("no-such-host.invalid") is None


def test_addresses_of_the_loopback():
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    assert "127.0.0.1" in addresses_of(names[0])


def test_hosts_that_lose_their_packets_are_told_from_those_that_pass_them():
    need_hosts()
    with hosts(2) as (one, other):
        assert one.reaches(other.name)
        other.cut()
        assert not one.reaches(other.name)


def test_the_interface_of_a_host_is_the_one_with_the_route():
    need_hosts()
    code = "import sys; from bigscl.distributed.ranks import interface_towards as f"
    code += "; print(*map(f, sys.argv[1:]))"
    with hosts(2) as (one, other):
        words = one.command([sys.executable, "-c", code, one.address, other.address])
        found = subprocess.run(words, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["eth0", "eth0"]


@pytest.mark.parametrize(
    "environment",
    [
        {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
        {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", INTERFACE: "mine"},
        {},
    ],
)
def test_only_ranks_on_several_nodes_without_a_chosen_interface_look_for_one(monkeypatch, environment):
    set_variables(monkeypatch, {"MASTER_ADDR": "192.0.2.1", **environment})
    monkeypatch.setattr(network, "rendezvous", None)  # fails where it is called
    choose_interface()


@pytest.mark.parametrize("master", ["127.0.0.1", "no-such-host.invalid"])
def test_ranks_none_of_which_knows_another_address_of_the_master_leave_the_choice_to_gloo(
    monkeypatch, master
):
    """As two launchers on one machine."""
    set_variables(monkeypatch, {"MASTER_ADDR": master, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1"})
    store = HashStore()
    store.set("bigscl/master/0", "")
    monkeypatch.setattr(network, "rendezvous", lambda url, timeout: iter([(store, 1, 2)]))
    choose_interface()
    assert INTERFACE not in os.environ
    assert store.get("bigscl/master/1") == b""


def set_variables(monkeypatch, values):
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", INTERFACE, "MASTER_ADDR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
