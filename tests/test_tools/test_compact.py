import os
import signal
import subprocess
import sys
import time
import uuid

import numpy as np
import pytest

from bigscl.common.digests import write_sealed
from bigscl.store import HeatmapStore
from bigscl.store.backends.backend import open_backend
from bigscl.store.format.quantize import LEVELS
from bigscl.store.lease import read_holder
from tests.builders import make_store
from tests.test_store.conftest import assert_same_rows
from tests.test_tools.conftest import bigscl


def files(run):
    """Every file of a store with its bytes."""
    return {file: file.read_bytes() for file in sorted((run / "store").rglob("*")) if file.is_file()}


def total(run):
    return sum(map(len, files(run).values()))


def read(run, ids=range(24), **options):
    return HeatmapStore.open(run / "store", **options).read(ids)


def test_a_dry_run_changes_nothing_and_foretells_the_size(run):
    before = files(run)
    for arguments in ([], ["--top", 3], ["--keep", 3]):
        answer = bigscl("compact", run, *arguments)
        assert answer.code == 0
        assert "nothing was changed" in answer.out
    assert files(run) == before


@pytest.mark.parametrize("arguments", [[], ["--top", 3], ["--top", 3, "--slots", 2], ["--keep", 3]])
def test_the_foretold_size_is_met(run, arguments):
    foretold = bigscl("compact", run, *arguments, "--json").json()
    done = bigscl("compact", run, *arguments, "--apply", "--json").json()
    assert foretold["bytes_before"] == done["bytes_before"]
    assert done["bytes_after"] == pytest.approx(foretold["bytes_after"], rel=0.02)
    # The lease is gone by now.
    assert total(run) == pytest.approx(done["bytes_after"], abs=400)


def test_old_snapshots_go_and_the_newest_stays_bit_for_bit(run):
    before = read(run)
    size = total(run)
    done = bigscl("compact", run, "--apply", "--json").json()
    assert done["drop"] == [3]
    assert total(run) < 0.7 * size
    assert_same_rows(read(run), before)
    assert [one["id"] for one in bigscl("show", run, "--json").json()["snapshots"]] == [4, 5]
    assert bigscl("verify", run).code == 0


def test_kept_snapshots_stay_bit_for_bit(run):
    before = {number: read(run, snapshot=number) for number in (3, 4)}
    assert bigscl("compact", run, "--keep", 3, "--apply").code == 0
    for number, rows in before.items():
        assert_same_rows(read(run, snapshot=number), rows)


def test_the_strongest_classes_keep_their_heatmaps(run, index):
    before = read(run)
    assert bigscl("compact", run, "--top", 3, "--apply").code == 0
    after = read(run)
    np.testing.assert_array_equal(after.scores, before.scores)
    assert after.classes.shape == (24, 3)
    annotated = index.labels_of(np.arange(24)) == 1
    for row in range(24):
        strength = before.scores[row].astype(float) + annotated[row]
        best = sorted(np.argsort(-strength, kind="stable")[:3].tolist())
        assert after.classes[row].tolist() == best
        np.testing.assert_array_equal(after.heatmaps[row], before.heatmaps[row, best])
    assert not (run / "store" / "arrays-000").exists()
    assert bigscl("verify", run).code == 0


def test_a_compacted_store_is_compacted_further_and_compressed(topk):
    done = bigscl("compact", topk, "--top", 2, "--slots", 2, "--codec", "zstd", "--apply", "--json").json()
    assert done["applied"]
    layout = bigscl("show", topk, "--json").json()["layout"]
    assert (layout["top"], layout["slots"], layout["codec"]) == (2, 2, "zstd")


def test_a_store_is_rewritten_with_rounded_heatmaps(topk):
    before = read(topk)
    done = bigscl("compact", topk, "--codec", "uint8", "--apply", "--json").json()
    assert done["bytes_after"] < done["bytes_before"] / 2
    after = read(topk)
    np.testing.assert_array_equal(after.scores, before.scores)
    assert np.isin(after.heatmaps, LEVELS).all()
    assert 0 < np.abs(after.heatmaps.astype(float) - before.heatmaps).max() < 0.0064
    assert bigscl("verify", topk).code == 0
    assert ", uint8," in bigscl("show", topk).out


def test_checkpoints_that_lose_their_snapshot_are_named(run):
    (run / "checkpoints" / "step-00000020").mkdir(parents=True)
    write_sealed(run / "checkpoints" / "step-00000020" / "progress.json", {"snapshot": 3})
    assert "no longer possible: resuming from step-00000020" in bigscl("compact", run).out
    assert "no longer possible" not in bigscl("compact", run, "--keep", 3).out


def test_a_leased_store_is_refused(run, index):
    with HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w", run="busy"):
        answer = bigscl("compact", run)
        assert answer.code == 1
        assert "not possible now: in use by run 'busy'" in answer.out
        answer = bigscl("compact", run, "--apply")
        assert answer.code == 2
        assert "in use by run 'busy'" in answer.err


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("dense", ["--slots", "2"], "can be rewritten only with --top K"),
        ("dense", ["--keep", "9"], "--keep 9: no such snapshot. Snapshots of this store: [3, 4]"),
        ("topk", ["--top", "4"], "nothing to rewrite"),
        ("dense", ["--top", "40"], "--top: 40, but there are only 10 classes"),
        ("topk", ["--top", "6"], "keeps only 4 classes per image"),
    ],
)
def test_what_cannot_be_done_is_refused(runs, name, arguments, message):
    answer = bigscl("compact", runs / name, *arguments)
    assert answer.code == 2
    assert message in answer.err


def test_rewriting_needs_the_data(bare):
    answer = bigscl("compact", bare, "--top", "3", "--apply")
    assert answer.code == 2
    assert "Add --shards PATTERN" in answer.err


SLOWLY = """
import signal, sys, time
from bigscl.store.format.zarr_group import ArrayGroup
from bigscl.tools.cli import main
signal.signal(signal.SIGINT, signal.default_int_handler)  # What a shell starts with & ignores it.
write = ArrayGroup.write
def slow(self, shard, slot, rows):
    digests = write(self, shard, slot, rows)
    print("wrote", flush=True)
    time.sleep(1)
    return digests
ArrayGroup.write = slow
main(["compact", sys.argv[1], "--top", "3", "--apply"])
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_compaction_leaves_the_store_as_it_was(run, how):
    before = read(run)
    command = [sys.executable, "-c", SLOWLY, str(run)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        process.stdout.readline()
        os.kill(process.pid, how)
        assert process.wait(30) != 0
    assert_same_rows(read(run), before)
    assert [one["id"] for one in bigscl("show", run, "--json").json()["snapshots"]] == [3, 4, 5]
    holder = read_holder(open_backend(run / "store"))
    assert (holder is not None) == (how == signal.SIGKILL)
    started = time.monotonic()
    assert bigscl("compact", run, "--top", 3, "--apply").code == 0
    assert time.monotonic() - started < 30
    assert HeatmapStore.open(run / "store").group.top == 3


def test_a_store_on_s3_is_compacted_like_one_on_disk(s3_options, index):
    url = f"s3://bucket/{uuid.uuid4().hex}"
    make_store(url, index, options=s3_options)
    reach = ("--endpoint", s3_options.endpoint, "--region", "us-east-1")
    shards = ("--shards", index.urls[0].replace("000000", "*"))
    before = bigscl("compact", url, *reach, "--json").json()
    done = bigscl("compact", url, *reach, *shards, "--top", 3, "--apply", "--json").json()
    assert done["bytes_after"] < 0.5 * before["bytes_before"]
    assert bigscl("verify", url, *reach, *shards).code == 0
    assert bigscl("unlock", url, *reach).code == 0
