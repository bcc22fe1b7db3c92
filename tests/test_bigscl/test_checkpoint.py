import contextlib
import io
import json
import resource
import shutil

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save

from bigscl.common.digests import FILES, file_digest, write_sealed
from bigscl.common.files import explain, find_folder, remove_folder
from bigscl.store import seal
from bigscl.training.checkpoint_folder import (
    Checkpoint,
    CheckpointError,
    Checkpoints,
    Progress,
    check_optimizer,
    check_ranks,
    check_tensors,
    misfit,
    write_files,
    write_state,
    write_tensors,
)
from bigscl.training.run_progress import rng_state


def files(value):
    return {
        "model.safetensors": write_tensors({"w": torch.full((2,), value)}),
        "more.pt": write_state({"a": [value]}),
    }


USUAL = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]


@pytest.mark.parametrize("dtypes", [[], ["float32", "int64"], USUAL, [*USUAL, "float8_e5m2"]], ids=len)
def test_weights_have_the_bytes_of_safetensors_whatever_their_names_types_and_shapes(dtypes):
    values = torch.linspace(-9, 9, 12)
    tensors = {
        f"{letter}.{name}": values.to(getattr(torch, name), copy=True).reshape(shape)
        for letter, shape in (("b", (3, 4)), ("a", (12,)), ('"é\n\x01\u2028', (2, 3, 2)))
        for name in dtypes
    }
    if dtypes:
        tensors |= {
            "scalar": torch.tensor(3.5),
            "empty": torch.zeros(0, 3),
            "z": values.clone().reshape(3, 4).T,
        }
    file = io.BytesIO()
    write_tensors(tensors)(file)
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    assert file.getvalue() == save(contiguous)


def test_tensors_are_written_from_their_memory_in_one_call_each_so_that_other_threads_run():
    written = []

    class Recorder:
        def write(self, data):
            written.append(data)

    write_tensors({"a": torch.zeros(1000, 1000), "b": torch.ones(70, dtype=torch.bfloat16)})(Recorder())
    header, *values = written
    assert len(header) < 200
    assert [(type(each), each.nbytes) for each in values] == [(memoryview, 4_000_000), (memoryview, 140)]


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

    def fail(file):
        file.write(b"half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        checkpoints.save(Progress(step=2), {"model.safetensors": fail})
    assert checkpoints.latest().progress.step == 1


def test_a_folder_is_replaced_whole_and_found_again_after_a_crash_between(tmp_path):
    path = tmp_path / "best"
    for value in (1, 2):
        write_files(path, {}, "metrics.json", {"value": value})
    assert json.loads((path / "metrics.json").read_text())["value"] == 2
    path.rename(tmp_path / ".best.old")

    def fail(file):
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_files(path, {"model.safetensors": fail}, "metrics.json", {"value": 3})
    assert json.loads((path / "metrics.json").read_text())["value"] == 2


def test_ends_of_epochs_are_kept_before_checkpoints_within_them(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    saved = [(85, False), (100, True), (185, False), (200, True), (285, False), (290, False)]
    kept = []
    for step, ends_epoch in saved:
        checkpoints.save(Progress(step=step, ends_epoch=ends_epoch), files(1.0))
        kept.append([found.progress.step for found in checkpoints.all()])
    assert kept == [[85], [85, 100], [100, 185], [100, 200], [200, 285], [200, 290]]


def test_places_that_no_epoch_end_needs_go_to_the_newest_of_the_others(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=3)
    for step, ends_epoch in [(3, False), (4, True), (6, False), (8, True)]:
        checkpoints.save(Progress(step=step, ends_epoch=ends_epoch), files(1.0))
    assert [found.progress.step for found in checkpoints.all()] == [4, 6, 8]


def test_a_checkpoint_vanishes_whole(tmp_path, monkeypatch):
    """A kill while its files are deleted leaves nothing that looks like a checkpoint."""
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(Progress(step=1), files(1.0))
    monkeypatch.setattr(shutil, "rmtree", lambda *_, **__: None)
    remove_folder(tmp_path / "step-00000001")
    assert checkpoints.paths() == []
    monkeypatch.undo()
    checkpoints.repair()
    assert not list(tmp_path.iterdir())


def test_a_checkpoint_that_was_being_replaced_is_found_and_put_back(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(Progress(step=1, epoch=3), files(1.0))
    (tmp_path / "step-00000001").rename(tmp_path / ".step-00000001.old")
    (tmp_path / ".step-00000001.partial").mkdir()
    assert checkpoints.latest().progress.epoch == 3
    assert find_folder(tmp_path / "step-00000001").name == ".step-00000001.old"
    checkpoints.repair()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_failed_check_before_the_last_rename_leaves_everything_as_it_was(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(Progress(step=1, epoch=3), files(1.0))

    def lost():
        assert (tmp_path / ".step-00000001.partial" / "progress.json").exists()
        raise RuntimeError("the lease was lost")

    with pytest.raises(RuntimeError, match="lease"):
        checkpoints.save(Progress(step=1, epoch=4), files(2.0), lost)
    assert checkpoints.latest().progress.epoch == 3
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_copies_of_a_user_are_no_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(Progress(step=1), files(1.0))
    shutil.copytree(tmp_path / "step-00000001", tmp_path / "step-00000001.good")
    assert [path.name for path in checkpoints.paths()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("name", "files", "values"),
    [
        ("model.safetensors", {"model.safetensors": write_tensors({"w": torch.zeros(1000)})}, {}),
        ("optimizer.pt", {"optimizer.pt": write_state({"w": torch.zeros(1000)})}, {}),
        ("metrics.json", {}, {"values": list(range(1000))}),
    ],
)
def test_a_full_disk_names_the_file_and_leaves_the_older_folder(tmp_path, name, files, values):
    write_files(tmp_path / "best", {}, "metrics.json", {"values": "old"})
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(OSError, match="File too large") as caught:
            write_files(tmp_path / "best", files, "metrics.json", values)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    assert explain(caught.value).startswith(f"{tmp_path / 'best' / name}: could not be written")
    assert json.loads((tmp_path / "best" / "metrics.json").read_text())["values"] == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["best"]


# Damaged files


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\0" * 90,
        b"[]",
        b"\xff",
        {"step": "x"},
        {"step": -1},
        {"epoch": True},
        {"best": []},
        {FILES: [1]},
    ],
)
def test_damaged_progress_is_an_error_that_names_the_file(tmp_path, content):
    data = json.dumps(seal(content)).encode() if isinstance(content, dict) else content
    (tmp_path / "progress.json").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"progress\.json: damaged: .*--resume"):
        Checkpoint(tmp_path)


def test_progress_of_earlier_revisions_is_refused(tmp_path):
    (tmp_path / "progress.json").write_text('{"epoch": 1, "step": 9, "snapshot": 3}')
    with pytest.raises(CheckpointError, match=r"progress\.json: .*earlier revision.*--resume"):
        Checkpoint(tmp_path)


STATE = {
    "phase_began": 0,
    "optimizer": {"state": {0: {"a": torch.ones(3)}}, "param_groups": []},
    "scaler": None,
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    weights = write_tensors({"w": torch.arange(20.0), "v": torch.ones(2, 2)})
    path = Checkpoints(folder, keep=1).save(
        Progress(step=1), {"model.safetensors": weights, "optimizer.pt": write_state(STATE)}
    )
    return {file.name: file.read_bytes() for file in path.iterdir()}


def read_damaged(folder, name, content):
    """Read and check a file of a checkpoint; nothing but CheckpointError may come of it."""
    (folder / name).write_bytes(content)
    # With the digest of the damaged bytes: what it would let through is refused by what it means.
    write_sealed(folder / "progress.json", {FILES: {name: file_digest(folder / name)}})
    checkpoint = Checkpoint(folder)
    if name == "optimizer.pt":
        check_optimizer(folder / name, checkpoint.state(name))
    else:
        expected = {"w": torch.zeros(20), "v": torch.zeros(2, 2)}
        check_tensors(folder / name, checkpoint.tensors(name), expected)


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt"])
def test_truncated_files_are_errors_that_name_the_file(tmp_path, saved, name):
    read_damaged(tmp_path, name, saved[name])
    lengths = [0, 1, 8, 9, *range(10, len(saved[name]), max(1, len(saved[name]) // 20)), len(saved[name]) - 1]
    for length in lengths:
        with pytest.raises(CheckpointError, match=name):
            read_damaged(tmp_path, name, saved[name][:length])


@given(st.data())
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "progress.json"])
def test_files_with_any_bytes_in_them_are_read_or_refused(tmp_path, saved, name, data):
    content = bytearray(saved[name])
    place = data.draw(st.integers(0, len(content) - 1))
    content[place : place + 8] = data.draw(st.binary(min_size=1, max_size=8))
    with contextlib.suppress(CheckpointError):
        if name == "progress.json":
            (tmp_path / name).write_bytes(content)
            Checkpoint(tmp_path)
        else:
            read_damaged(tmp_path, name, bytes(content))


def read_both(folder):
    checkpoint = Checkpoint(folder)
    return checkpoint.tensors("model.safetensors"), checkpoint.state("optimizer.pt")


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "progress.json"])
def test_every_flipped_bit_is_an_error_that_names_the_file(tmp_path, saved, name):
    for other, content in saved.items():
        (tmp_path / other).write_bytes(content)
    read_both(tmp_path)
    for place in range(0, len(saved[name]), max(1, len(saved[name]) // 100)):
        content = bytearray(saved[name])
        content[place] ^= 1 << place % 8
        (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=rf"{name}.*(damaged|no digest).*--resume") as caught:
            read_both(tmp_path)
        assert "\n" not in str(caught.value)


def test_files_that_hold_something_else_are_refused(tmp_path):
    path = tmp_path / "file"
    for wrong in (None, [], {"w": 3}, {"w": torch.zeros(4)}, {}, {"w": torch.zeros(3), "x": torch.zeros(1)}):
        with pytest.raises(CheckpointError, match="file"):
            check_tensors(path, wrong, {"w": torch.zeros(3)})
    for wrong in (None, {}, {**STATE, "optimizer": {}}, {**STATE, "phase_began": "x"}):
        with pytest.raises(CheckpointError, match="file"):
            check_optimizer(path, wrong)
    visited = torch.zeros(3, dtype=torch.uint8)
    check_ranks(path, {"rng": [rng_state()], "visited": visited}, 20)
    for wrong in (
        {"rng": [b"", rng_state()], "visited": visited},
        {"rng": [rng_state()[:-1]], "visited": visited},
        {"rng": [rng_state()], "visited": visited[:2]},
        {"rng": [rng_state()], "visited": visited.float()},
        {"rng": 3, "visited": visited},
        [],
    ):
        with pytest.raises(CheckpointError, match="file"):
            check_ranks(path, wrong, 20)


def trained(optimizer, shapes):
    parameters = [torch.nn.Parameter(torch.ones(shape)) for shape in shapes]
    made = optimizer(parameters, lr=0.1)
    sum(each.sum() for each in parameters).backward()
    made.step()
    return made


def test_states_of_another_optimizer_or_network_do_not_fit():
    adam = trained(torch.optim.Adam, [(2, 3), (3,)])
    others = {
        "another optimizer": [trained(torch.optim.SGD, [(2, 3), (3,)])],
        "it has 1 parameters, expected 2": [trained(torch.optim.Adam, [(2, 3)])],
        "is (3, 2), expected (2, 3)": [trained(torch.optim.Adam, [(3, 2), (3,)])],
    }
    # Torch 2.4 saves the same fields for Adam and AdamW, so nothing tells their states apart.
    if "decoupled_weight_decay" in adam.param_groups[0]:
        others["another optimizer"].append(trained(torch.optim.AdamW, [(2, 3), (3,)]))
    assert misfit(adam.state_dict(), adam.state_dict(), adam.param_groups) is None
    for reason, optimizers in others.items():
        for other in optimizers:
            found = misfit(other.state_dict(), adam.state_dict(), adam.param_groups)
            assert found is not None
            assert reason in found
