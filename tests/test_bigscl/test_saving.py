"""Checkpoints that are written while training goes on."""

import threading
import time

import pytest
import torch

from bigscl.training import saver as saving
from bigscl.training.checkpoint_folder import Checkpoints, Progress, copy_on_host, write_state
from bigscl.training.saver import WritingThread


def test_error_of_the_writing_thread_is_raised_by_whoever_asks():
    thread = WritingThread(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        thread.result()
    assert isinstance(thread.error, ZeroDivisionError)


def test_error_that_nobody_asks_for_ends_the_process(monkeypatch):
    """The main thread may wait for a rank that waits for a slot which only this thread would free."""
    left = threading.Event()
    monkeypatch.setattr(WritingThread, "PATIENCE_SECONDS", 0.05)
    monkeypatch.setattr(saving, "exit_now", lambda code: left.set())
    reported = []
    monkeypatch.setattr(saving, "report_to_launcher", reported.append)
    WritingThread(lambda: 1 / 0)
    assert left.wait(10)
    assert "ZeroDivisionError" in reported[0]


def test_what_is_written_has_the_values_of_the_moment_it_was_taken(tmp_path):
    weights = torch.zeros(3)
    write = write_state({"weights": [weights, {"step": 4}], "pair": (weights, 1)})
    weights += 1
    with (tmp_path / "state.pt").open("wb") as file:
        write(file)
    found = torch.load(tmp_path / "state.pt", weights_only=True)
    assert found["weights"][0].tolist() == [0, 0, 0]
    assert found["weights"][1] == {"step": 4}
    assert found["pair"][0].tolist() == [0, 0, 0]


def test_copies_share_no_memory():
    weights = torch.zeros(3, requires_grad=True)
    copied = copy_on_host({"a": weights})["a"]
    assert copied.data_ptr() != weights.data_ptr()
    assert not copied.requires_grad


def test_snapshots_that_stay_are_those_of_the_checkpoints_that_will_be_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step, ends in ((2, False), (4, True), (6, False), (8, False)):
        progress = Progress(step=step, snapshot=10 * step, ends_epoch=ends)
        foretold = checkpoints.snapshots_after(progress)
        checkpoints.save(progress, {})
        assert checkpoints.snapshots() == foretold
    assert foretold == {40, 80}, "the end of an epoch is preferred"


def test_thread_is_given_some_time_after_an_error_elsewhere():
    done = threading.Event()

    def write():
        time.sleep(0.2)
        done.set()

    thread = WritingThread(write)
    thread.join(10)
    assert done.is_set()
