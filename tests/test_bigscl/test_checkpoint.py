import json

import pytest
import torch

from bigscl.checkpoint import Checkpoints, Progress, write_folder, write_json, write_state, write_tensors


def files(value):
    return {
        "model.safetensors": write_tensors({"w": torch.full((2,), value)}),
        "more.pt": write_state({"a": [value]}),
    }


def test_a_checkpoint_comes_back_as_it_was_saved(tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=2)
    assert checkpoints.latest() is None
    progress = Progress(epoch=3, step=70, snapshot=9, best=0.5, best_epoch=2)
    checkpoints.save(progress, files(1.5))
    found = checkpoints.latest()
    assert found.progress == progress
    assert found.tensors("model.safetensors")["w"].tolist() == [1.5, 1.5]
    assert found.state("more.pt") == {"a": [1.5]}


def test_the_newest_are_kept_and_name_the_snapshots_that_must_stay(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(5):
        checkpoints.save(Progress(step=step, snapshot=step + 10), files(step))
    assert [found.progress.step for found in checkpoints.all()] == [3, 4]
    assert checkpoints.snapshots() == {13, 14}
    checkpoints.drop_after(checkpoints.all()[0])
    assert checkpoints.snapshots() == {13}


def test_a_write_that_fails_leaves_the_older_checkpoint_and_no_half_of_the_new(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(Progress(step=1), files(1.0))

    def fail(path):
        path.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(Progress(step=2), {"model.safetensors": fail})
    assert checkpoints.latest().progress.step == 1


def test_a_folder_is_replaced_whole_and_found_again_after_a_crash_between(tmp_path):
    path = tmp_path / "best"
    for value in (1, 2):
        write_folder(path, {"metrics.json": write_json({"value": value})})
    assert json.loads((path / "metrics.json").read_text()) == {"value": 2}
    path.rename(tmp_path / ".best.old")

    def fail(path):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_folder(path, {"metrics.json": fail})
    assert json.loads((path / "metrics.json").read_text()) == {"value": 2}
