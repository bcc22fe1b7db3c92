"""The page "from your folder of images to mined labels", executed on real photographs."""

import csv
import json
import re
import shlex
import shutil
import tarfile
from pathlib import Path

import pytest

from bigscl.data.index import load_index
from tests.builders import VOC, real_data
from tests.test_tools.conftest import bigscl

PAGE = Path(__file__).parent.parent.parent / "docs" / "your-images.md"
CLASSES = {14: "person", 6: "car", 11: "dog", 2: "bird"}
PER_CLASS = 12


def blocks(kind):
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)


def write_photos(folder):
    """Some photographs of a few classes, each in the folder of one thing that it shows."""
    left = dict.fromkeys(CLASSES, PER_CLASS)
    with tarfile.open(VOC / "train-000000.tar") as tar:
        images = {}
        for member in tar:
            stem, _, kind = member.name.rpartition(".")
            content = tar.extractfile(member).read()
            if kind == "jpg":
                images[stem] = content
                continue
            (given,) = json.loads(content)["observed"]
            if left.get(given, 0):
                left[given] -= 1
                place = folder / CLASSES[given] / f"{stem}.jpg"
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(images[stem])
    assert not any(left.values())


@real_data
def test_the_commands_of_the_page_lead_to_mined_labels(tmp_path, monkeypatch):
    pytest.importorskip("efficientnet_lite_pytorch")
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos")
    (config,) = blocks("yaml")
    (tmp_path / "photos.yaml").write_text(config)
    for command in "".join(blocks("sh")).splitlines():
        name, *words = shlex.split(command)
        assert name == "bigscl"
        answer = bigscl(*words)
        assert answer.code == 0, f"{command}\n{answer.out}\n{answer.err}"
    assert (tmp_path / "found.png").stat().st_size > 10_000
    with (tmp_path / "found.csv").open() as file:
        found = list(csv.DictReader(file))
    trust = bigscl("show", "runs/photos", "--json").json()["trust"]
    assert trust["hidden"] == round(0.1 * len(CLASSES) * PER_CLASS)
    # K is 1.5, so half as many labels as there are images are to be found, and the hidden ones.
    assert len(found) == len(CLASSES) * PER_CLASS // 2 + trust["hidden"] - trust["found"]
    assert {row["name"] for row in found} <= set(CLASSES.values())
    assert all((tmp_path / "photos" / row["path"]).is_file() for row in found)


@real_data
def test_a_table_gives_the_same_samples_as_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_photos(tmp_path / "photos")
    paths = sorted(path.relative_to(tmp_path / "photos") for path in (tmp_path / "photos").rglob("*.jpg"))
    rows = "".join(f"{path},{path.parent}\n" for path in paths)
    (tmp_path / "photos.csv").write_text(f"path,label\n{rows}")
    (by_table,), (by_folder, scan) = blocks("csv"), blocks("sh")[0].splitlines()
    indexes = []
    for command in (by_folder, by_table):
        for line in (command, scan):
            answer = bigscl(*shlex.split(line)[1:])
            assert answer.code == 0, answer.err
        indexes.append(load_index("shards/photos/train-*.tar"))
        shutil.rmtree("shards")
    first, second = (
        {index.source(n): index.given[n].tolist() for n in index.ids().tolist()} for index in indexes
    )
    assert first == second
    assert len(first) == len(CLASSES) * PER_CLASS
    assert indexes[0].class_names == indexes[1].class_names
