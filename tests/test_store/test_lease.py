import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import replace

import pytest

from bigscl.store import HeatmapStore, seal
from bigscl.store.backends.backend import open_backend
from bigscl.store.errors import LeaseHeld
from bigscl.store.lease import Holder, Lease, break_lease, read_holder
from tests.test_store.conftest import make_annotations


def test_a_second_writer_is_refused_and_told_who_holds_the_store(place, annotations):
    url, options = place
    HeatmapStore.create(url, annotations, heatmap_size=2, options=options)
    first = HeatmapStore.open(url, annotations=annotations, mode="w", run="first", options=options)
    with first:
        expected = rf"in use by run 'first' \(host {socket.gethostname()}, pid {os.getpid()}, since 20"
        with pytest.raises(LeaseHeld, match=expected):
            HeatmapStore.open(url, annotations=annotations, mode="w", run="second", options=options)
        HeatmapStore.open(url, options=options)
    HeatmapStore.open(url, annotations=annotations, mode="w", run="second", options=options).close()


def hold_and_die(url):
    code = (
        "import os, sys; from store.backends.backend import open_backend\n"
        "from store.lease import Lease\n"
        "Lease.acquire(open_backend(sys.argv[1]), 'killed'); os.kill(os.getpid(), 9)"
    )
    subprocess.run([sys.executable, "-c", code, url], check=False)


def test_the_lease_of_a_killed_process_is_taken_over(tmp_path):
    annotations = make_annotations()
    HeatmapStore.create(tmp_path / "store", annotations, heatmap_size=2)
    hold_and_die(str(tmp_path / "store"))
    assert read_holder(open_backend(tmp_path / "store")).run == "killed"
    HeatmapStore.open(tmp_path / "store", annotations=annotations, mode="w", run="next").close()


def leave_lease_of_another_host(backend):
    Lease.acquire(backend, "elsewhere").release()
    who = {"run": "elsewhere", "host": "other-host", "pid": 1, "started": "1", "machine": "other-boot"}
    backend.replace("lease.json", json.dumps(seal({**who, "since": 0.0, "token": "t"})).encode())


def test_a_holder_on_another_host_is_dead_when_its_heart_stands_still(tmp_path):
    backend = open_backend(tmp_path)
    leave_lease_of_another_host(backend)
    Lease.acquire(backend, "next", patience_seconds=0.2).release()


def test_a_holder_on_another_host_lives_while_its_heart_beats(tmp_path, monkeypatch):
    backend = open_backend(tmp_path)
    holder = Lease.acquire(backend, "alive", beat_seconds=0.05)
    monkeypatch.setattr(socket, "gethostname", lambda: "yet-another-host")
    with pytest.raises(LeaseHeld, match="run 'alive'"):
        Lease.acquire(backend, "next", patience_seconds=30)
    holder.release()


def test_a_broken_lease_stops_its_holder_at_the_next_commit(tmp_path):
    annotations = make_annotations()
    HeatmapStore.create(tmp_path / "store", annotations, heatmap_size=2)
    with HeatmapStore.open(tmp_path / "store", annotations=annotations, mode="w", run="old") as old:
        assert break_lease(old.backend).run == "old"
        with HeatmapStore.open(tmp_path / "store", annotations=annotations, mode="w", run="new") as new:
            with pytest.raises(LeaseHeld, match=r"run 'old' .* was broken; it is now held by run 'new'"):
                old.commit(epoch=0)
            new.commit(epoch=0)
            old.close()
            assert read_holder(new.backend).run == "new"


def test_a_failing_heartbeat_is_logged_and_tried_again(tmp_path, caplog, monkeypatch):
    backend = open_backend(tmp_path)
    lease = Lease.acquire(backend, "run", beat_seconds=0.02)
    monkeypatch.setattr(backend, "replace", lambda *_: (_ for _ in ()).throw(OSError("no route to host")))
    deadline = time.monotonic() + 10
    while "no route to host" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.02)
    assert "heartbeat failed: no route to host" in caplog.text
    lease.release()


def leave_lease_of_this_host(backend, **changes):
    """The lease of a process that is not there, by its pid."""
    holder = replace(Holder.this_process("elsewhere"), pid=2**22 + 1, **changes)
    backend.create("lease.json", holder.to_bytes())


def test_a_dead_pid_of_this_machine_is_taken_over_at_once(tmp_path):
    backend = open_backend(tmp_path)
    leave_lease_of_this_host(backend)
    Lease.acquire(backend, "next", patience_seconds=3600).release()


@pytest.mark.parametrize("machine", ["another-boot pid:[1]", ""])
def test_the_same_host_name_on_another_machine_says_nothing_about_its_pid(tmp_path, monkeypatch, machine):
    """Another pid namespace, another boot, or a lease that does not say: only the heartbeat counts."""
    backend = open_backend(tmp_path)
    leave_lease_of_this_host(backend, machine=machine)
    beats = iter(range(1000))
    read = backend.read
    living = lambda key: str(next(beats)).encode() if key.endswith(".beat") else read(key)  # noqa: E731
    monkeypatch.setattr(backend, "read", living)
    with pytest.raises(LeaseHeld, match="run 'elsewhere'"):
        Lease.acquire(backend, "next", patience_seconds=5)
    monkeypatch.undo()
    Lease.acquire(backend, "next", patience_seconds=0.05).release()


def test_of_two_that_see_a_dead_lease_one_takes_it(place):
    url, options = place
    backend = open_backend(url, options)
    leave_lease_of_this_host(backend)
    dead = backend.read("lease.json")
    winner = Lease.acquire(backend, "winner")
    # The slower one saw the dead lease too, and acts only now.
    assert not backend.swap("lease.json", dead, Holder.this_process("loser").to_bytes())
    assert read_holder(backend).run == "winner"
    winner.release()
    assert read_holder(backend) is None
    assert not [name for name in backend.names("") if name.endswith(".beat")]


def test_a_broken_lease_is_nobodys_and_can_be_taken(place):
    url, options = place
    backend = open_backend(url, options)
    lease = Lease.acquire(backend, "old")
    assert break_lease(backend).run == "old"
    assert read_holder(backend) is None
    Lease.acquire(backend, "new").release()
    lease.release()
