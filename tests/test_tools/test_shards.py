"""`bigscl shards`: each kind from the command line, resumed, refused, summarised."""

import json
import tarfile

import pytest
from typer.testing import CliRunner

from bigscl.tools.cli import app, main
from tests.devkits import make_coco, make_imagenet, make_voc


def run(*arguments):
    return CliRunner().invoke(app, ["shards", *map(str, arguments)], catch_exceptions=False)


def summary(*arguments):
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def members(path):
    with tarfile.open(path) as tar:
        return tar.getnames()


def test_folder_becomes_shards_of_jpg_and_cls(tmp_path):
    make_imagenet(tmp_path / "imagenet")
    found = summary("folder", tmp_path / "imagenet", tmp_path / "out", "--samples-per-shard", 5)
    assert found["parts"] == {
        "train": {"samples": 12, "shards": 3, "full": 12, "given": 12},
        "val": {"samples": 6, "shards": 2, "full": 6, "given": 6},
    }
    assert members(tmp_path / "out" / "val-000001.tar") == [
        "ILSVRC2012_val_00000006.jpg",
        "ILSVRC2012_val_00000006.cls",
        "ILSVRC2012_val_00000006.json",
    ]
    assert (tmp_path / "out" / "classes.txt").read_text().split() == ["n01440764", "n01443537", "n01484850"]


def test_voc_becomes_shards_with_given_labels(tmp_path):
    images = {f"2008_{i:06d}": [("dog", 0, 1, 1, 9, 9), ("cat", 0, 3, 3, 20, 20)] for i in range(10)}
    make_voc(tmp_path / "VOC2012", images, {"train": list(images), "val": ["2008_000000"]})
    found = summary("voc", tmp_path, tmp_path / "out", "--resize", 16, "--negatives", 2)
    assert found["classes"] == 20
    assert found["parts"]["train"] == {"samples": 8, "shards": 1, "full": 16, "given": 8}
    assert found["parts"]["val"]["samples"] == 2
    with tarfile.open(tmp_path / "out" / "train-000000.tar") as tar:
        label = json.load(tar.extractfile(tar.getnames()[1]))
    assert label["full"] == [7, 11]
    assert len(label["given"]) == 1
    assert len(label["negatives"]) == 2
    assert len(label["boxes"]) == 2


def test_coco_becomes_shards_with_given_labels(tmp_path):
    images = {number: [(1, 0, 0, 10, 10), (2, 5, 5, 10, 10)] for number in range(1, 6)}
    make_coco(tmp_path, {"train2014": images, "val2014": {7: [(1, 0, 0, 1, 1)]}}, [(1, "person"), (2, "car")])
    found = summary("coco", tmp_path, tmp_path / "out", "--positives", 2)
    assert found["parts"]["train"] == {"samples": 4, "shards": 1, "full": 8, "given": 8}
    assert (tmp_path / "out" / "classes.txt").read_text() == "person\ncar\n"


SMALL = ("--single", 3, "--train", 4, "--val", 2, "--test", 2, "--samples-per-shard", 2)


def test_scenes_need_no_source_and_a_second_run_writes_nothing(tmp_path):
    pytest.importorskip("sklearn")
    found = summary("scenes", tmp_path, *SMALL)
    assert {part: counts["samples"] for part, counts in found["parts"].items()} == {
        "single": 3,
        "train": 4,
        "val": 2,
        "test": 2,
    }
    assert found["shards_already_there"] == 0
    stamps = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.tar")}
    assert summary("scenes", tmp_path, *SMALL)["shards_already_there"] == len(stamps) == 6
    assert {path: path.stat().st_mtime_ns for path in tmp_path.glob("*.tar")} == stamps


def test_dry_run_says_what_would_be_written_and_writes_nothing(tmp_path):
    pytest.importorskip("sklearn")
    result = run("scenes", tmp_path / "out", *SMALL, "--dry-run")
    assert "would contain scenes, 10 classes" in result.stdout
    assert "train: 4 samples in 2 shards of up to 2" in result.stdout
    assert not (tmp_path / "out").exists()


def test_plain_lines_tell_the_progress_where_there_is_no_terminal(tmp_path):
    pytest.importorskip("sklearn")
    result = run("scenes", tmp_path, *SMALL)
    assert f"{tmp_path}: 2 of 11 samples, single-000000.tar" in result.stderr
    assert f"{tmp_path}: 11 of 11 samples, test-000000.tar" in result.stderr
    assert "4 of" in result.stdout


def test_mistakes_end_in_one_line_and_exit_code_2(tmp_path, capsys):
    for arguments in (
        ["folder", tmp_path / "nowhere", tmp_path / "out"],
        ["voc", tmp_path, tmp_path / "out"],
        ["coco", tmp_path, tmp_path / "out"],
        ["folder", tmp_path, tmp_path / "out", "--synsets", "list.txt"],
    ):
        with pytest.raises(SystemExit) as stopped:
            main(["shards", *map(str, arguments)])
        assert stopped.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1
    assert not (tmp_path / "out").exists()
