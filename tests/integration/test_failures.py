"""One rank's error ends all ranks within seconds, and its reason is the last thing that is printed."""

import json
import time

import pytest

from bigscl.common.failures import lost_other_ranks, report_to_launcher
from tests.builders import write_config
from tests.integration.runs import Running, steps_of, store_of

REASON = "RuntimeError: a mistake in somebody's network"
SECONDS = 15
"""Well below the 30 seconds after which the launcher kills its ranks."""


@pytest.mark.parametrize("processes", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_error_on_one_rank_ends_all_and_its_traceback_is_printed_last(tmp_path, shards, processes):
    model = {"backbone": "tests.integration.tiny:failing_net"}
    config = write_config(tmp_path / "run.yaml", shards, model=model, data={"batch_size": 2})
    with Running(tmp_path / "run", config, processes=processes) as running:
        assert running.wait_for_step(5), running.output
        began = time.monotonic()
        assert running.wait(60) != 0
        assert time.monotonic() - began < SECONDS, running.output
    output = running.output
    assert "forcefully exiting" not in output
    *_, traceback = output.partition("Root Cause (first observed failure):")
    assert REASON in traceback, output
    assert f"rank      : {processes - 1}" in traceback
    assert "Traceback (most recent call last)" in traceback
    # The lease is given back: the next start takes the store at once.
    assert "free" in json.loads((tmp_path / "run" / "store" / "lease.json").read_text())
    assert steps_of(tmp_path / "run") >= 5
    store_of(tmp_path / "run", shards)


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[third_party/gloo/gloo/pair.cc:534] Connection closed by peer"), True),
        (RuntimeError("[third_party/gloo/unbound_buffer.cc:129] Timed out waiting 15000ms for send"), True),
        (RuntimeError("NCCL error in: ProcessGroupNCCL.cpp, remote process exited"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("Connection closed by peer"), False),
    ],
)
def test_errors_of_lost_connections_are_told_from_others(error, lost):
    assert lost_other_ranks(error) is lost


def test_launcher_gets_the_reason_in_its_own_format(tmp_path, monkeypatch):
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

    path = tmp_path / "error.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    report_to_launcher("bigscl.train: disk full")
    failure = ProcessFailure(local_rank=1, pid=2, exitcode=2, error_file=str(path))
    assert failure.message["extraInfo"]["py_callstack"] == "bigscl.train: disk full"
    assert abs(failure.timestamp - time.time()) < 60
