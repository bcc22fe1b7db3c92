"""`bigscl preflight` rehearses a run with the real trainer, judges it, and leaves nothing behind."""

import json
import os
import shutil
import subprocess

import pytest

from bigscl.store import StorageOptions, open_backend
from tests.builders import index_of, write_config
from tests.forks import trainer_server
from tests.integration.runs import copy_run, launcher_words

SHORT = ("--steps", 3, "--json")
FAULTS = "tests.integration.preflight_faults"


def preflight(config, *words, processes=1, fault=None) -> "subprocess.CompletedProcess[str]":
    if fault is None:
        arguments = ("bigscl.tools.cli", "preflight", config, *SHORT, *words)
        return trainer_server().run_module(*arguments, processes=processes)
    return trainer_server().run(f"{FAULTS}:{fault}", config, *SHORT, *words, processes=processes)


def facts_of(done) -> dict:
    assert done.returncode in (0, 1), done.stdout + done.stderr
    return json.loads(done.stdout.strip().splitlines()[-1])


def no_faults(facts) -> bool:
    """Whether nothing is wrong; on a busy machine the storage may be too slow for a tiny network."""
    return all("storage" in problem for problem in facts["problems"])


def tree(folder) -> dict:
    """Every file below a folder, with its size and time."""
    found = {}
    for path in sorted(folder.rglob("*")):
        state = path.stat()
        found[str(path.relative_to(folder))] = (state.st_size if path.is_file() else None, state.st_mtime_ns)
    return found


def test_rehearsal_measures_every_kind_of_epochs_and_touches_no_run(tmp_path, shards, plain):
    run = copy_run(plain, tmp_path / "run")
    config = write_config(tmp_path / "run.yaml", shards, log={"trackers": ["tensorboard"]})
    before, names = tree(run), sorted(os.listdir(tmp_path))
    facts = facts_of(preflight(config, "--processes", 4))
    assert no_faults(facts)
    ends = facts["epoch_end"]
    assert ends["processes"] == 4
    assert {"selection", "reading of scores", "log of scores"} < set(ends["stages"])
    assert all(seconds > 0 for seconds in ends["stages"].values())
    assert 0 < ends["idle_share"] < 1
    assert ends["creates_per_second"] > 0
    assert sorted(os.listdir(tmp_path)) == names
    assert tree(run) == before
    warmup, main = facts["kinds"]
    assert (warmup["is_warmup"], warmup["layout"], warmup["first_epoch"], warmup["last_epoch"]) == (
        *(True, "dense", 0, 0),
    )
    assert (main["is_warmup"], main["layout"], main["first_epoch"], main["last_epoch"]) == (
        *(False, "topk", 1, 2),
    )
    for kind in (warmup, main):
        assert kind["steps"] == 3
        assert kind["images_per_second"] > 0
        assert set(kind["stages"]) == {"decode", "step", "heatmaps", "writeback"}
        slowest = min(kind["stages"], key=kind["stages"].__getitem__)
        assert kind["bound"] == slowest
        assert set(kind["waits"]) == {"data", "heatmaps", "writeback"}
    found = {(one["precision"], one["quantity"]): one for one in facts["differences"]}
    compared = ("logits", "loss", "gradient", "scores", "heatmaps", "cell_visits", "sample_visits")
    assert set(found) == {("fp32", name) for name in compared}
    assert all(one["found"] <= one["tolerance"] for one in found.values())
    # In single precision something differs: the reference is not the device itself.
    assert found["fp32", "logits"]["found"] > 0
    assert facts["disk_bytes"] > 0
    assert facts["checkpoint_bytes"] > 0
    assert facts["process_bytes"] > 2**20
    # Ten steps of eight images in each of three epochs, at least.
    assert facts["hours"] * 3600 > 3 * 150 / max(kind["images_per_second"] for kind in (warmup, main)) * 0.9


def test_two_ranks_rehearse_together_and_one_reports(tmp_path, shards):
    """With larger batches than the device is compared on."""
    model = {"backbone": "tests.integration.tiny:noisy_net"}
    config = write_config(tmp_path / "run.yaml", shards, model=model, data={"batch_size": 16})
    done = preflight(config, processes=2)
    facts = facts_of(done)
    assert len(done.stdout.strip().splitlines()) == 1
    assert facts["world_size"] == 2
    assert done.returncode == 0
    assert facts["problems"] == []
    for kind in facts["kinds"]:
        assert "ranks" in kind["waits"]
        assert 0 <= kind["exchange_share"] < 1
    assert os.listdir(tmp_path) == ["run.yaml"]


@pytest.mark.parametrize(
    ("model", "fault", "quantity"),
    [("wrong_net", None, "logits"), ("tiny_net", "wrong_averages", "heatmaps")],
)
def test_device_that_computes_something_else_is_a_problem(tmp_path, shards, model, fault, quantity):
    config = write_config(
        tmp_path / "run.yaml", shards, model={"backbone": f"tests.integration.tiny:{model}"}
    )
    done = preflight(config, fault=fault)
    assert done.returncode == 1, done.stdout + done.stderr
    facts = facts_of(done)
    assert any(f"{quantity} in fp32: differs from the CPU reference" in one for one in facts["problems"])
    if fault is not None:  # only this one
        assert [one["quantity"] for one in facts["differences"] if not one["ok"]] == [quantity]


@pytest.mark.parametrize(
    ("fault", "processes"), [("interrupted", 1), ("interrupted", 2), ("interrupted_twice", 1)]
)
def test_interrupted_rehearsal_leaves_nothing_behind(tmp_path, shards, fault, processes):
    config = write_config(tmp_path / "run.yaml", shards)
    done = preflight(config, fault=fault, processes=processes)
    assert done.returncode == 130, done.stdout + done.stderr
    assert done.stdout == ""
    assert os.listdir(tmp_path) == ["run.yaml"]


def test_failing_rehearsal_leaves_nothing_behind(tmp_path, shards):
    config = write_config(tmp_path / "run.yaml", shards)
    done = preflight(config, fault="failing_storage")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "somewhere: could not be written" in done.stderr.splitlines()[-1]
    assert os.listdir(tmp_path) == ["run.yaml"]
    failing = write_config(
        tmp_path / "run.yaml", shards, model={"backbone": "tests.integration.tiny:failing_net"}
    )
    done = preflight(failing, processes=2)
    assert done.returncode != 0
    assert "a mistake in somebody's network" in done.stderr
    assert os.listdir(tmp_path) == ["run.yaml"]


def test_store_of_its_own_place_is_rehearsed_beside_it(tmp_path, shards):
    place = {"url": str(tmp_path / "far" / "store")}
    assert no_faults(facts_of(preflight(write_config(tmp_path / "run.yaml", shards, store=place))))
    assert os.listdir(tmp_path) == ["run.yaml"]


def test_bucket_is_empty_afterwards(tmp_path, shards, s3_options):
    place = {
        "url": "s3://bucket/preflight/store",
        "endpoint": s3_options.endpoint,
        "region": s3_options.region,
    }
    assert no_faults(facts_of(preflight(write_config(tmp_path / "run.yaml", shards, store=place))))
    options = StorageOptions(endpoint=s3_options.endpoint, region=s3_options.region)
    assert list(open_backend("s3://bucket/preflight", options).sizes("")) == []
    assert os.listdir(tmp_path) == ["run.yaml"]


def test_objective_without_memory_has_no_storage_to_measure(tmp_path, shards):
    config = write_config(
        tmp_path / "run.yaml",
        shards,
        objective={"base": "role", "consistency": "none"},
        store={"kind": "none", "top": None},
    )
    facts = facts_of(preflight(config))
    assert facts["problems"] == []
    assert set(facts["kinds"][0]["stages"]) == {"decode", "step"}
    assert {one["quantity"] for one in facts["differences"]} == {"logits", "loss", "gradient"}


@pytest.mark.slow
def test_report_under_the_real_launcher_ends_with_the_problems(tmp_path, shards):
    config = write_config(tmp_path / "run.yaml", shards, data={"batch_size": 64, "workers": 3})
    job = ["-m", "bigscl", "preflight", config, "--steps", 3]
    done = trainer_server().run_module(*launcher_words(2), *job)
    assert done.returncode == 1
    assert "problem: 2 loader workers get no batch" in done.stdout
    assert "bigscl preflight: problems found" in done.stderr
    assert os.listdir(tmp_path) == ["run.yaml"]


def test_unreadable_images_are_a_problem(tmp_path, shards):
    damaged = tmp_path / "damaged"
    shutil.copytree(shards, damaged)
    index = index_of(damaged)
    broken = int(index.ids()[5])
    with (damaged / "train-000000.tar").open("r+b") as tar:
        tar.seek(int(index.image_offsets[broken]))
        tar.write(bytes(int(index.image_bytes[broken])))
    config = write_config(tmp_path / "run.yaml", damaged, data={"max_bad_share": 0.5})
    done = preflight(config, "--steps", 50)
    assert done.returncode == 1
    # On a busy machine slow storage may be another one.
    assert "1 image could not be read: `bigscl index` checks all shards" in facts_of(done)["problems"]


def test_precision_of_the_run_and_single_precision_are_compared(tmp_path, shards):
    config = write_config(tmp_path / "run.yaml", shards, hardware={"precision": "bf16"})
    facts = facts_of(preflight(config))
    if facts["precision"] != "bf16":
        pytest.skip("bf16 does not work on this CPU")
    assert facts["problems"] == []
    logits = {one["precision"]: one for one in facts["differences"] if one["quantity"] == "logits"}
    # Half the bits: that the network did compute in bf16 is seen in its error.
    assert logits["bf16"]["found"] > 100 * logits["fp32"]["found"]
    assert logits["bf16"]["tolerance"] > logits["fp32"]["tolerance"]
