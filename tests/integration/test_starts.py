"""Starts of a run after a kill at a chosen moment, with damaged files, or with the wrong checkpoint.

Whatever happened before, the same command resumes the run, and it ends as if it had never been interrupted;
a start that is refused changes nothing on disk.
"""

import hashlib
import json
import os
import shutil
import subprocess

import pytest

from bigscl.common.digests import write_sealed
from bigscl.evaluation.target import find_weights
from bigscl.store import HeatmapStore
from tests.builders import TWO_EPOCHS, index_of, write_config
from tests.decoders import needs_nvimgcodec
from tests.integration.moments import InterruptedTrainer
from tests.integration.runs import assert_same_runs, copy_run

SCENES = (24, 12, 8)

pytestmark = pytest.mark.timeout(600)
SNAPSHOTS, STORE, FOLDERS, CHECKPOINTS = (
    "bigscl.store.snapshots:SnapshotLog",
    "bigscl.store.heatmap_store:HeatmapStore",
    "bigscl.common.files",
    "bigscl.training.checkpoint_folder",
)


@pytest.fixture(scope="module")
def train(trainer_server):
    """Runs the trainer, interrupted if asked."""
    return InterruptedTrainer(trainer_server)


@pytest.fixture(scope="module")
def config(tmp_path_factory, shards):
    """Two epochs of four steps, with checkpoints at 3, 4, 6 and 8, of which two are kept."""
    return write_config(
        tmp_path_factory.mktemp("configs") / "run.yaml",
        shards,
        # On this part of the images the second epoch is better than the first, and replaces `best`.
        data={"val": str(shards / "val-*.tar"), "workers": 0, "batch_size": 6, "shorter": 256},
        store={"slots": 3, "history_samples": 0},
        schedule=TWO_EPOCHS,
        checkpoint={"every_steps": 3},
    )


@pytest.fixture(scope="module")
def whole(config, train):
    """The folder of the run that nothing interrupts."""
    code, output = train(config)
    assert code == 0, output
    return config.with_suffix("")


@pytest.fixture(scope="module")
def stopped(config, train, whole, tmp_path_factory):
    """The folder of a run that was killed after its checkpoint of step 6; that of step 4 is there too."""
    folder = tmp_path_factory.mktemp("stopped") / "run"
    train(config, "--run", folder, kill=f"{STORE}.commit before 4")
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == [
        "step-00000004",
        "step-00000006",
    ]
    return folder


@pytest.fixture
def again(stopped, tmp_path):
    """A copy of it to resume from."""
    return copy_run(stopped, tmp_path / "again")


def files_of(folder):
    """The bytes of every file, by its path; without the lease, which beats."""
    paths = (path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lease.json")
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def assert_refused(done, *parts):
    code, output = done
    assert code == 2, output
    assert output.count("bigscl.train: ") == 1
    assert "Traceback" not in output
    assert all(part in output for part in parts), output


def assert_resumed(done, folder, whole, shards):
    code, output = done
    assert code == 0, output
    assert_same_runs(folder, whole, shards)
    assert not [path for path in folder.rglob(".*") if path.name.startswith((".step", ".best"))]


# Kills

MORE_KILLS = [
    *(f"{STORE}.drop_announced {when} {n}" for n in (1, 2, 3, 4, 5) for when in ("before", "after")),
    *(f"{SNAPSHOTS}.drop before {n}" for n in (1, 2, 3, 4)),
    *(f"{SNAPSHOTS}.create {when} {n}" for n in (1, 2, 3, 4, 5) for when in ("before", "after")),
    *(f"{STORE}.compact {when} 1" for when in ("before", "after")),
    *(f"{STORE}.create {when} 1" for when in ("before", "after")),
    "bigscl.training.run_folder:RunFolder.write_start before 1",
    "bigscl.training.run_folder:RunFolder.write_start after 1",
    *(f"{FOLDERS}:_rename {when} {n}" for n in range(1, 9) for when in ("before", "after")),
    *(f"pathlib:Path.replace {when} {n}" for n in range(1, 3) for when in ("before", "after")),
    *(f"{CHECKPOINTS}:Checkpoints.prune before {n}" for n in range(1, 6)),
    *(f"os:unlink before {n}" for n in range(1, 30, 4)),
]


def kill_and_resume(train, config, folder, moment, whole, shards):
    train(config, "--run", folder, kill=moment)
    assert_resumed(train(config, "--run", folder), folder, whole, shards)


def test_kill_between_a_checkpoint_and_the_drop_of_old_snapshots(tmp_path, train, config, shards):
    """Every slot is named by then, as all checkpoints are of one array group without `top`."""
    folder, once = tmp_path / "run", tmp_path / "once"
    assert train(config, "--run", once, "--store.top", "null")[0] == 0
    moment = "bigscl.store.heatmap_store:HeatmapStore.drop_announced before 3"
    train(config, "--run", folder, "--store.top", "null", kill=moment)
    assert_resumed(train(config, "--run", folder, "--store.top", "null"), folder, once, shards)


@pytest.mark.slow
@pytest.mark.parametrize("moment", MORE_KILLS)
def test_run_killed_at_more_moments_ends_as_if_it_never_was(tmp_path, train, config, whole, shards, moment):
    kill_and_resume(train, config, tmp_path / "run", moment, whole, shards)


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        f"{STORE}.drop_announced before 1",
        f"{SNAPSHOTS}.drop before 1",
        "bigscl.training.run_folder:RunFolder.write_start before 1",
        f"{CHECKPOINTS}:remove_folder before 1",
        "os:unlink after 2",
        "os:unlink after 3",
        "bigscl.training.metrics_log:MetricsLog.drop_after after 1",
    ],
)
def test_resume_of_an_older_checkpoint_killed_at_a_chosen_moment(train, config, again, whole, shards, moment):
    older = again / "checkpoints" / "step-00000004"
    train(config, "--run", again, "--resume", older, kill=moment)
    assert_resumed(train(config, "--run", again), again, whole, shards)


def test_two_kills_before_the_first_checkpoint(tmp_path, train, config, whole, shards):
    """The second start rolls back to the beginning, which no run has written, and commits nothing."""
    folder = tmp_path / "run"
    for moment in ("after", "before"):
        train(config, "--run", folder, kill=f"{STORE}.commit {moment} 1")
    assert_resumed(train(config, "--run", folder), folder, whole, shards)


def test_epochs_without_a_checkpoint_can_be_repeated_from_the_beginning(tmp_path, train, config, shards):
    options = ["--checkpoint.every_epochs", 2, "--checkpoint.every_steps", "null"]
    folder, once = tmp_path / "run", tmp_path / "once"
    assert train(config, "--run", once, *options)[0] == 0
    train(config, "--run", folder, *options, kill="bigscl.train:Trainer.train_epoch before 2")
    assert_resumed(train(config, "--run", folder, *options), folder, once, shards)


def test_best_weights_are_found_while_they_are_replaced_and_after_a_kill(
    tmp_path, train, config, whole, shards
):
    folder = tmp_path / "run"
    train(config, "--run", folder, kill=f"{FOLDERS}:_rename after 6")
    assert not (folder / "best").exists()
    assert find_weights(folder) == folder / ".best.old" / "model.safetensors"
    assert_resumed(train(config, "--run", folder), folder, whole, shards)
    assert find_weights(folder) == folder / "best" / "model.safetensors"


def test_a_store_that_was_never_trained_into_may_be_deleted(tmp_path, train, config):
    """The size of the images was wrong, say; nothing is lost with this store."""
    folder = tmp_path / "run"
    train(config, "--run", folder, kill=f"{STORE}.commit before 1")
    assert_refused(
        train(config, "--run", folder, "--data.size", 64, "--data.shorter", 64),
        "has heatmaps of side 12",
        f"Nothing was trained into this one: you can delete {folder / 'store'}",
    )
    shutil.rmtree(folder / "store")
    assert train(config, "--run", folder, "--data.size", 64, "--data.shorter", 64)[0] == 0


# Damaged files


@pytest.mark.parametrize("name", ["config.yaml", "run.json", "metrics.jsonl", "environment.jsonl"])
@pytest.mark.parametrize("content", [b"", b"\0" * 100], ids=["empty", "zeros"])
def test_damaged_small_file_is_rebuilt(train, config, again, whole, shards, name, content):
    before = json.loads((again / "run.json").read_text())
    kept = (again / name).read_bytes() if name == "metrics.jsonl" else b""
    (again / name).write_bytes(kept + content)
    done = train(config, "--run", again)
    assert_resumed(done, again, whole, shards)
    assert json.loads((again / "run.json").read_text()) == before
    if name != "environment.jsonl" and not (name == "metrics.jsonl" and content == b""):
        assert f"{again / name}: " in done[1]


def test_id_of_a_run_without_a_checkpoint_is_recovered_from_its_store(tmp_path, train, config, whole, shards):
    folder = tmp_path / "run"
    train(config, "--run", folder, kill=f"{STORE}.commit after 1")
    before = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_bytes(b"")
    assert_resumed(train(config, "--run", folder), folder, whole, shards)
    assert json.loads((folder / "run.json").read_text()) == before


FILES = ["model.safetensors", "optimizer.pt", "ranks.pt", "progress.json"]


@pytest.mark.parametrize("name", FILES)
def test_older_checkpoint_with_a_truncated_file_costs_nothing(train, config, again, name):
    older = again / "checkpoints" / "step-00000004"
    (older / name).write_bytes((older / name).read_bytes()[:-30])
    before = files_of(again)
    assert_refused(train(config, "--run", again, "--resume", older), "--resume", str(older / name))
    assert files_of(again) == before


def test_mistyped_settings_cost_nothing(train, config, again):
    older, before = again / "checkpoints" / "step-00000004", files_of(again)
    wrong = ["--model.backbone", "tests.integration.tiny:noisy_net"]
    done = train(config, "--run", again, "--resume", older, *wrong)
    assert_refused(done, str(older / "model.safetensors"), "does not fit", "model.backbone")
    assert files_of(again) == before


def test_mistyped_optimizer_costs_nothing(train, config, again):
    """Step 6 is within the second phase, whose optimizer it resumes."""
    before = files_of(again)
    assert_refused(
        train(config, "--run", again, "--optimizer.name", "sgd"), "optimizer.pt", "another optimizer"
    )
    assert files_of(again) == before


def test_checkpoint_of_another_run_is_refused(train, config, again, tmp_path, shards):
    other = tmp_path / "other"
    assert train(config, "--run", other, "--seed", 3)[0] == 0
    before = files_of(again)
    foreign = other / "checkpoints" / "step-00000004"
    assert_refused(train(config, "--run", again, "--resume", foreign), "was saved by run", str(foreign))
    progress = json.loads((foreign / "progress.json").read_text())
    own = json.loads((again / "checkpoints" / "step-00000004" / "progress.json").read_text())
    assert progress["snapshot"] == own["snapshot"]  # or the snapshot would give it away
    shutil.rmtree(again / "checkpoints" / "step-00000006")
    shutil.copytree(other / "checkpoints" / "step-00000008", again / "checkpoints" / "step-00000008")
    code, output = train(config, "--run", again)
    assert code == 0, output
    assert "cannot resume from" in output
    assert files_of(again).keys() != before.keys()


@pytest.mark.parametrize("change", [{"step": 5}, {"epoch": 0}])
def test_checkpoint_that_does_not_stand_where_its_snapshot_does_is_refused(train, config, again, change):
    older = again / "checkpoints" / "step-00000004"
    file = older / "progress.json"
    write_sealed(file, {**json.loads(file.read_text()), **change})
    before = files_of(again)
    assert_refused(
        train(config, "--run", again, "--resume", older), "stands at step", "was committed at step 4"
    )
    assert files_of(again) == before


@pytest.mark.parametrize("name", ["model.safetensors", "progress.json"])
def test_damaged_newest_checkpoint_is_set_aside_and_an_older_one_used(
    train, config, again, whole, shards, name
):
    (again / "checkpoints" / "step-00000006" / name).write_bytes(b"\0" * 100)
    done = train(config, "--run", again)
    assert_resumed(done, again, whole, shards)
    assert "cannot resume from" in done[1]
    assert (again / "checkpoints" / "unusable-step-00000006").is_dir()


def test_checkpoint_without_its_snapshot_is_passed_over(train, config, again, whole, shards):
    number = json.loads((again / "checkpoints" / "step-00000006" / "progress.json").read_text())["snapshot"]
    (again / "store" / "snapshots" / f"{number:08d}.json").unlink()
    done = train(config, "--run", again)
    assert_resumed(done, again, whole, shards)
    assert f"no snapshot {number}" in done[1]


def test_run_whose_checkpoints_are_all_damaged_is_not_started_over(train, config, again):
    for file in (again / "checkpoints").glob("*/ranks.pt"):
        file.write_bytes(b"")
    before = files_of(again)
    assert_refused(
        train(config, "--run", again), "none can be resumed from", "step-00000004", "step-00000006"
    )
    assert files_of(again) == before


def test_another_backbone_is_told_once_however_many_checkpoints_there_are(train, config, again):
    before = files_of(again)
    done = train(config, "--run", again, "--model.backbone", "bigscl.models.smallnet:small_resnet")
    assert_refused(done, "step-00000004, step-00000006, for one reason", "model.safetensors")
    assert done[1].count("model.safetensors") == 1
    assert "cannot resume from" not in done[1]
    assert files_of(again) == before


def test_store_that_a_checkpoint_needs_is_never_created(train, config, again):
    shutil.rmtree(again / "store")
    before = files_of(again)
    assert_refused(train(config, "--run", again), "needs snapshot", "store")
    assert files_of(again) == before


def test_second_job_in_the_same_folder_changes_nothing(train, config, again, shards):
    number = json.loads((again / "checkpoints" / "step-00000006" / "progress.json").read_text())["snapshot"]
    annotations = index_of(shards).annotations()
    name = json.loads((again / "run.json").read_text())["id"]
    with HeatmapStore.open(again / "store", annotations=annotations, mode="w", snapshot=number, run=name):
        before = files_of(again)
        assert_refused(train(config, "--run", again, "--seed", 5), "in use by")
        assert files_of(again) == before


# A full disk


@pytest.mark.parametrize(
    ("moment", "name"),
    [
        ("bigscl.training.metrics_log:append_lines before 3", ""),
        ("bigscl.training.checkpoint_folder:write_safetensors before 2", "model.safetensors"),
        ("torch:save before 3", "optimizer.pt"),
        ("matplotlib.figure:Figure.savefig before 1", "epoch-002.png"),
    ],
)
def test_full_disk_is_one_line_and_the_run_resumes(tmp_path, train, config, whole, shards, moment, name):
    options = ["--run", tmp_path / "run", "--log.pictures_every", 2, "--store.history_samples", 2]
    assert_refused(train(config, *options, full=moment), "No space left on device", "Free some space", name)
    assert_resumed(train(config, *options), tmp_path / "run", whole, shards)


@pytest.mark.parametrize("size", ["40k", "100k", "160k", "240k"])
def test_run_on_a_really_full_file_system_resumes_when_there_is_space(
    tmp_path, train, config, whole, shards, size
):
    """It is full in the creation of the store, in a step, in a checkpoint, or in the next phase."""
    small = tmp_path / "small"
    small.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(small)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small tmpfs is not allowed here")
    try:
        done = train(config, "--run", small / "run")
        assert_refused(done, "No space left on device", "Free some space")
        subprocess.run(["mount", "-o", "remount,size=50m", str(small)], check=True)
        assert_resumed(train(config, "--run", small / "run"), small / "run", whole, shards)
    finally:
        subprocess.run(["umount", str(small)], check=True)


def test_files_of_a_run_have_the_mode_that_the_user_asks_for(whole):
    mask = os.umask(0)
    os.umask(mask)
    modes = {path.name: path.stat().st_mode & 0o777 for path in whole.rglob("*") if path.is_file()}
    assert {name: oct(mode) for name, mode in modes.items() if mode != 0o666 & ~mask} == {}


# Another decoder


def decoders_of(folder):
    return [
        json.loads(path.read_text()).get("decoder")
        for path in sorted(folder.glob("checkpoints/step-*/progress.json"))
    ]


@pytest.mark.parametrize("saved", ["torchvision", "nvimgcodec"])
def test_checkpoints_name_their_decoder_and_a_resume_with_another_is_said_loudly(
    config, train, again, whole, shards, saved
):
    for path in again.glob("checkpoints/step-*/progress.json"):
        progress = json.loads(path.read_text())
        assert progress["decoder"] == "torchvision"
        write_sealed(path, {**progress, "decoder": saved})
    code, output = train(config, "--run", again)
    assert_resumed((code, output), again, whole, shards)
    warning = f"data.decoder: torchvision, but {again}/checkpoints/step-00000006 was trained with nvimgcodec"
    assert (warning in output.replace("\n", "")) == (saved == "nvimgcodec"), output
    assert decoders_of(again)[-1] == "torchvision"


@needs_nvimgcodec
def test_a_run_that_resumes_with_another_decoder_says_so_once_and_names_it(config, train, again):
    code, output = train(config, "--run", again, "--data.decoder", "nvimgcodec")
    assert code == 0, output
    assert "was trained with torchvision" in output
    assert decoders_of(again)[-1] == "nvimgcodec"
    code, output = train(config, "--run", again, "--data.decoder", "nvimgcodec")
    assert code == 0, output
    assert "was trained with" not in output
