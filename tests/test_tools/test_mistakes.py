"""Mistakes that people make: the answer is a line or a list, with the value and what to do; exit code 2."""

import sys
from pathlib import Path

import pytest
import torch

from bigscl.models.families import create_network
from tests.builders import index_of, jpeg, make_once, make_shards, make_store, write_config, write_shards
from tests.test_tools.conftest import bigscl

SMALL = "bigscl.models.smallnet:small_resnet"
TABLES = {
    "no_header.csv": "cat/0.jpg,cat\ndog/1.jpg,dog\n",
    "gone.csv": "path,label\ncat/0.jpg,cat\ncat/7.jpg,cat\n",
    "ragged.csv": "path,label\ncat/0.jpg,cat,dog\n",
    "photos.csv": "path,label\ncat/0.jpg,cat\ndog/1.jpg,dog\n",
    "photos.xlsx": "PK",
    "other_labels.csv": "key,positives\nIMG_0001,3\n",
    "wrong_class.csv": "key,positives\ntrain_000000,digit99\n",
    "answers.csv": "image,answer\ncat/0.jpg,yes\n",
    "numbers.csv": "path,label\ncat/0.jpg,0\ndog/1.jpg,9\n",
    "names.txt": "cat\ndog\n",
}


def make_world(folder: Path) -> None:
    """Photographs, tables, shards, and a run, with what else is needed to be wrong."""
    for number, name in enumerate(("cat", "dog")):
        (folder / "photos" / name).mkdir(parents=True)
        (folder / "photos" / name / f"{number}.jpg").write_bytes(jpeg(number))
    for name, text in TABLES.items():
        (folder / "photos" / name).write_text(text)
    for name in ("empty", "flat", "hollow/cat", "hollow/dog"):
        (folder / name).mkdir(parents=True)
    (folder / "flat" / "1.jpg").write_bytes(jpeg(1))
    (folder / "hollow" / "cat" / "1.jpg").write_bytes(jpeg(1))
    index = index_of(make_shards(folder / "shards", 12, 6))
    (make_shards(folder / "others", 3, 3) / "bigscl-index-train.npz").rename(folder / "others" / "index.npz")
    for name in ("unindexed", "numbered"):
        (folder / name).mkdir()
        write_shards(folder / name, [3], num_classes=3)
    bigscl("index", folder / "numbered" / "train-*.tar")
    make_store(folder / "run" / "store", index, epochs=1)
    (folder / "run" / "config.yaml").write_text(f"data:\n  train: {folder}/shards/train-*.tar\n")
    write_config(folder / "new.yaml", folder / "shards")
    network = create_network(SMALL, 4, None, {})
    torch.save(network.state_dict(), folder / "small.pt")
    (folder / "misspelt.yaml").write_text(
        (folder / "new.yaml").read_text().replace("batch_size", "batchsize")
    )
    (folder / "nothing.yaml").write_text("run: runs/x\ndata: {batch_size: 8}\n")


# The command, and parts of its answer: the value that is wrong, and what to do.
TRAIN, TABLE, EVALUATE = "train new.yaml ", "shards table photos/", f"evaluate --backbone {SMALL} "
# fmt: off
MISTAKES = {
    # Data
    "folder of images that is not there": (
        "shards folder photo out", "photo: not there", "expected a folder"),
    "empty folder": ("shards folder empty out", "empty", "expected <class>/<image>"),
    "images without subfolders": ("shards folder flat out", "flat", "expected <class>/<image>"),
    "class folder without images": ("shards folder hollow out", "hollow/dog", "Fill or remove it"),
    "misspelt sub-command": ("shards foldr photos out", "foldr", "Did you mean 'folder'?"),
    "CSV without header": (TABLE + "no_header.csv out", "cat/0.jpg, cat", "Expected a header"),
    "paths of other folders": (TABLE + "gone.csv out", "photos/cat/7.jpg", "--images FOLDER says where"),
    "misspelt column": (TABLE + "photos.csv out --label-column labl", "labl", "found path, label"),
    "spreadsheet": (TABLE + "photos.xlsx out", "photos.xlsx", ".csv, .tsv"),
    "row with a comma too many": (TABLE + "ragged.csv out", "line 2", "another number of columns"),
    "label out of range": (
        TABLE + "numbers.csv out --classes photos/names.txt", "unknown class '9'", "0 to 1"),
    "missing extra of data": ("shards hf photos out", "datasets", "pip install 'bigscl[hf]'"),
    "glob without a match": ("index shard/train-*.tar", "shard/train-*.tar", "Expected .tar"),
    # Training
    "misspelt verb": ("trian new.yaml", "trian", "did you mean train?"),
    "config that is not there": ("train nwe.yaml", "nwe.yaml", "`bigscl configs` lists"),
    "config that is an image": ("train photos/cat/0.jpg", "photos/cat/0.jpg", "YAML"),
    "misspelt setting in a file": ("train misspelt.yaml", "data.batchsize", "did you mean data.batch_size?"),
    "misspelt setting": (TRAIN + "--data.batchsize 8", "data.batchsize", "did you mean data.batch_size?"),
    "settings that are missing": ("train nothing.yaml", "2 mistakes", "data.train: missing"),
    "two mistakes": (TRAIN + "--selection.K 0 --data.size big", "selection.K: 0", "data.size: 'big'"),
    "K below 1": (TRAIN + "--selection.K 0.5", "0.5", "greater than or equal to 1 or 'auto'"),
    "epochs that are no number": (TRAIN + "--schedule.main.epochs many", "'many'", "a valid integer"),
    "batch of no images": (TRAIN + "--data.batch_size 0", "data.batch_size: 0", "greater than or equal to 1"),
    "shards that are not there": (TRAIN + "--data.train shard/*.tar", "shard/*.tar", "Expected .tar"),
    "shards without index": (
        TRAIN + "--data.train unindexed/*.tar", "unindexed", "Create it with `bigscl index`"),
    "index of other shards": (
        TRAIN + "--data.train_index others/index.npz", "others/index.npz", "on these shards"),
    "run folder of another run": (TRAIN + "--run run", "run/store", "Use another store.url"),
    "run folder below a file": (
        TRAIN + "--run photos/photos.csv/run", "photos/photos.csv/run", "Check the path"),
    "folder that cannot be written": (TRAIN + "--run /sys/bigscl", "/sys/bigscl", "Use another place"),
    "misspelt backbone": (TRAIN + "--model.backbone resnet5O", "resnet5O", "did you mean resnet50?"),
    "missing extra of a network": (
        TRAIN + "--model.backbone timm:resnet10t", "timm:resnet10t", "pip install timm"),
    "weights that are not there": (TRAIN + "--model.weights w.pt", "w.pt", "Give a file"),
    "weights of another network": (
        TRAIN + "--model.backbone resnet18 --model.weights small.pt", "small.pt", "Only the head"),
    "labels of another dataset": (
        TRAIN + "--data.labels_file photos/other_labels.csv", "IMG_0001", "look like"),
    "class that does not exist": (TRAIN + "--data.labels_file photos/wrong_class.csv", "digit99", "10 names"),
    "full labels that are not there": (
        TRAIN + "--data.train numbered/*.tar --data.labels full", "data.labels: full", "Use `given`"),
    "processes below 1": ("plan new.yaml --processes 0", "--processes", "greater than or equal to 1"),
    # Looking
    "run that is not there": ("show runs/typo", "runs/typo", "check the path"),
    "misspelt option": ("show run --snaphot 1", "--snaphot", "--snapshot"),
    "snapshot that was dropped": ("show run --snapshot 99", "no snapshot 99", "retained are"),
    "shards of another store": (
        "render run -o x.png --shards numbered/*.tar", "numbered/*.tar", "Give the shards"),
    "picture of an unknown kind": ("render run -o x.gif", "x.gif", ".png"),
    "sample that does not exist": ("render run -o x.png --sample train_99", "train_99", "keys look like"),
    "class by a wrong name": ("render run -o x.png --class horse", "horse", "There are 10"),
    "table of an unknown kind": ("export run labels -o x.xlsx", "x.xlsx", ".csv, .jsonl, .parquet"),
    "output that exists": ("export run labels -o photos/photos.csv", "photos/photos.csv", "--overwrite"),
    "images of another dataset": (
        "export run labels -o x.csv --images photos", "run/store", "row n is sample n"),
    "answers without their columns": (
        "review import run photos/answers.csv", "answers.csv", "`bigscl review export`"),
    "page of no run": ("view typo", "typo", "check the path"),
    # Afterwards
    "evaluation of nothing": ("evaluate", "nothing to evaluate", "--backbone and --weights"),
    "shards with other classes": (
        EVALUATE + "--weights small.pt --shards numbered/*.tar", "4 classes", "--classes 4"),
    "run without weights": ("publish run out", "run: neither", "model.safetensors"),
    "run that does not run": ("stop typo", "typo", "not the folder of a run"),
}
# fmt: on


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    return make_once(tmp_path_factory, "mistakes", make_world)


def files_of(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_answered_with_what_to_do(world, monkeypatch, name):
    command, value, remedy = MISTAKES[name]
    monkeypatch.chdir(world)
    if name.startswith("missing extra"):
        monkeypatch.setitem(sys.modules, "datasets" if "hf" in command else "timm", None)
    before = files_of(world)
    answer = bigscl(*command.split())
    assert answer.code == 2, answer.out
    # Lines of the log may come before.
    lines = [line for line in answer.err.splitlines() if " I " not in line]
    assert lines[0].startswith("bigscl"), answer.err
    assert all(line.startswith("  ") for line in lines[1:]), answer.err
    assert len(lines) == 1 or "mistake" in lines[0], answer.err
    assert value in answer.err
    assert remedy in answer.err
    assert files_of(world) == before
