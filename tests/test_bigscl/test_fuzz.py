"""Every parser of bigscl/ on damaged files: a result, or an error of our own that names the file."""

import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from hypothesis import example, given
from hypothesis import strategies as st
from safetensors.torch import save as to_safetensors

from bigscl.common.files import BadFile
from bigscl.config import ConfigError, load_config, parse_yaml
from bigscl.data.build_index import NoSamples, scan
from bigscl.data.decode import decode
from bigscl.data.epoch_plan import evaluation_plan
from bigscl.data.index import default_path, load_index, stored_fingerprint
from bigscl.data.labels.real_labels import match_real_labels, read_real_labels
from bigscl.data.loader import BadSamples, Loader
from bigscl.data.open_tar import Unreadable, open_shard
from bigscl.data.tar import members
from bigscl.data.transforms import EvaluationTransform
from bigscl.datasets.folder import read_ground_truth, read_synsets
from bigscl.datasets.multilabel import Protocol, coco, voc
from bigscl.datasets.writer import ImageFile, Resize
from bigscl.evaluation.predictions import SavedPredictions, load_predictions
from bigscl.models.families.base import load_state, read_state
from tests.builders import classed, encoded, jpeg, labelled, picture, write_shards, write_tar
from tests.decoders import decoded, every_decoder
from tests.devkits import make_coco, make_voc
from tests.fuzz import allowing, fuzzed, mutated

PROTOCOL = Protocol(seed=1)


@pytest.fixture(scope="module")
def folder():
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


# Images.

IMAGES = (
    jpeg(1),
    encoded(picture(1), progressive=True),
    encoded(picture(1).convert("CMYK")),
    *(encoded(picture(1), kind) for kind in ("PNG", "WEBP", "BMP")),
    encoded(picture(1).convert("P"), "GIF"),
)


@every_decoder
@fuzzed(50)
@given(content=mutated(*IMAGES))
def test_damaged_images_decode_or_are_unreadable(decoder, content):
    try:
        image = decoded(decoder, content)
    except Unreadable:
        return
    assert image.dtype == torch.uint8
    assert EvaluationTransform(size=16)(image, 0).pixels.shape == (3, 16, 16)


@fuzzed(50)
@given(content=mutated(*IMAGES, encoded(picture(1), "TIFF"), encoded(picture(1), "PPM")))
def test_damaged_images_go_into_shards(folder, content):
    (folder / "image").write_bytes(content)
    extension, stored = ImageFile(path=str(folder / "image"), resize=Resize(size=8, mode="short")).encoded()
    assert extension in ("jpg", "png", "webp")
    assert stored == content or decode(bytearray(stored)).shape[0] == 3


# Tars.


def tar_bytes() -> bytes:
    with tempfile.TemporaryDirectory() as path:
        kept = [
            *classed("a" * 120, 1, 0),
            *labelled("b", 2, full=[1], given=[1], negatives=[0]),
            *classed("c", 3, 1),
        ]
        return write_tar(Path(path) / "x.tar", kept).read_bytes()


TAR = tar_bytes()


@fuzzed(50)
@given(content=mutated(TAR))
@example(content=b"")
@example(content=gzip.compress(TAR)[:300])
def test_damaged_tars_are_indexed_and_read(folder, content):
    path = folder / "x.tar"
    path.write_bytes(content)
    try:
        index, problems = scan(str(path), num_classes=2)
    except NoSamples:
        return
    assert all(str(problem).isprintable() for problem in problems)
    plan = evaluation_plan(index.shard_sizes, index.rows_per_shard, batch_size=4)
    bad = BadSamples(index, index.num_samples, max_share=1)
    batches = list(Loader(index, plan, 0, EvaluationTransform(size=16), bad=bad))
    assert sum(map(len, batches)) + len(bad.reasons) == index.num_samples


@fuzzed(50)
@given(content=mutated(TAR), compressed=st.booleans())
def test_members_of_damaged_tars_lie_inside_of_them(folder, content, compressed):
    path = folder / "y.tar"
    path.write_bytes(gzip.compress(content) if compressed else content)
    try:
        shard = open_shard(str(path))
    except Unreadable:
        return
    reasons: list[str] = []
    found = list(members(shard, reasons.append))
    shard.close()
    assert all(member.offset >= 512 and member.size >= 0 for member in found)
    assert compressed or all(member.offset + member.size <= len(content) for member in found)
    assert len(reasons) <= 102


@fuzzed(50)
@given(
    kind=st.sampled_from(["cls", "json"]),
    content=mutated(b"1", b'{"labels": [0, 1], "given": [1], "negatives": []}'),
)
def test_damaged_labels_cost_at_most_their_sample(folder, kind, content):
    path = write_tar(
        folder / "z.tar", [("a.jpg", b"x"), (f"a.{kind}", content), ("b.jpg", b"x"), ("b.cls", b"1")]
    )
    index, problems = scan(str(path), num_classes=2)
    assert index.num_samples + len({problem.key for problem in problems}) == 2


# Indexes.


@pytest.fixture(scope="module")
def indexed(folder):
    shards = write_shards(folder, [3, 2])
    scan(shards)[0].save(default_path(shards))
    return shards, default_path(shards).read_bytes()


def load_or_refuse(shards, path: Path) -> None:
    with allowing(BadFile, naming=path.parent):
        index = load_index(shards, path)
        index.labels_of(index.ids())
        assert [index.name(int(n)) for n in index.ids()]
    with allowing(BadFile, naming=path):
        stored_fingerprint(path)


@fuzzed(50)
@given(data=st.data())
def test_damaged_indexes_are_refused_by_name(folder, indexed, data):
    shards, content = indexed
    (folder / "damaged.npz").write_bytes(data.draw(mutated(content)))
    load_or_refuse(shards, folder / "damaged.npz")


WRONG_ARRAYS = st.sampled_from(
    [
        np.float32([1, 2]),
        np.array("text"),
        np.array([["a", "b"]]),
        np.int64([-1] * 6),
        np.uint64([2**63] * 6),
        np.int64([2**62] * 6),
        np.zeros((2, 3), np.int64),
        np.int64([]),
        np.array([True] * 6),
        np.int64(3),
    ]
)


@fuzzed(50)
@given(data=st.data())
def test_indexes_with_other_arrays_are_refused_by_name(folder, indexed, data):
    shards, content = indexed
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    for name in data.draw(st.lists(st.sampled_from(sorted(arrays)), min_size=1, max_size=3)):
        if data.draw(st.booleans()):
            arrays[name] = data.draw(WRONG_ARRAYS)
        else:
            arrays.pop(name, None)
    np.savez(folder / "other.npz", **arrays)
    load_or_refuse(shards, folder / "other.npz")


def test_index_whose_offsets_are_beyond_64_bits_is_refused_by_name(folder, indexed):
    shards, content = indexed
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    arrays["negatives.offsets"] = np.full(7, 2**63, np.uint64)
    np.savez(folder / "long.npz", **arrays)
    with pytest.raises(BadFile, match=r"long.npz.*not as many as its offsets say"):
        load_index(shards, folder / "long.npz")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=6,
)


@fuzzed(50)
@given(data=st.data())
def test_indexes_with_another_head_are_refused_by_name(folder, indexed, data):
    shards, content = indexed
    with np.load(io.BytesIO(content)) as file:
        arrays = dict(file)
    head = json.loads(arrays["head"].tobytes())
    head[data.draw(st.sampled_from(sorted(head)))] = data.draw(JSON)
    head = data.draw(st.sampled_from([head, head, head, data.draw(JSON)]))
    arrays["head"] = np.frombuffer(json.dumps(head).encode(), np.uint8)
    np.savez(folder / "head.npz", **arrays)
    load_or_refuse(shards, folder / "head.npz")


# Configs.

CONFIG = (Path(__file__).parents[2] / "configs" / "quickstart_scl.yaml").read_bytes()
BOMB = b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
    b"%c: &%c [%s]\n" % (c, c, b",".join([b"*%c" % (c - 1)] * 9)) for c in range(98, 112)
)


def config_or_refuse(path: Path, overrides=()) -> None:
    with allowing(ConfigError):
        load_config(path, overrides)


@fuzzed(20)
@given(content=mutated(CONFIG))
@example(content=b"")
@example(content=BOMB)
@example(content=b"a: &a [*a]")
@example(content=b"&a ? *a : *a")
@example(content=b"[" * 5000)
@example(content=b"{a: " * 5000)
@example(content=b"\xff\xfe")
@example(content=b"a: !!python/object:os.system x")
@example(content=b"a: !!int x\nb: !!bool x\nc: !!float ''\nd: !!timestamp x")
@example(content=b"run: " + b"9" * 5000)
@example(content=b"a: 2001-99-99")
@example(content=b"? [1, 2]\n: 3\n? {a: 1}\n: 2")
@example(content=b'1: 2\nnull: 3\n"\\e[2J": 4')
@example(content=CONFIG + b"\nseed: 99999999999999999999\n")
def test_damaged_configs_are_refused_by_name(folder, content):
    (folder / "config.yaml").write_bytes(content)
    config_or_refuse(folder / "config.yaml")


@fuzzed(20)
@given(
    override=st.one_of(
        st.tuples(
            st.sampled_from(
                ["--run", "--data", "--data.crop.scale", "--seed", "--log.trackers", "--..", "--", "--a=b"]
            ),
            st.one_of(st.text(max_size=12), JSON.map(lambda value: yaml.safe_dump(value))),
        ),
        st.lists(st.text(max_size=12), max_size=3).map(tuple),
    )
)
@example(override=("--seed", "[1"))
@example(override=("--seed", "{" * 2000))
@example(override=("--seed", "&a [*a]"))
@example(override=("--data.mean", "[.nan, .inf, 1]"))
@example(override=("--schedule.main.learning_rate", ".inf"))
@example(override=("--data.batch_size", "1" * 5000))
@example(override=("--seed", BOMB.decode()))
def test_damaged_overrides_are_refused(folder, override):
    (folder / "good.yaml").write_bytes(CONFIG)
    config_or_refuse(folder / "good.yaml", override)


@pytest.mark.parametrize("text", ["[1", "{", "a: b: c", "&a [*a]", "!!int x", '"\0"'])
def test_a_broken_override_is_named(tmp_path, text):
    (tmp_path / "good.yaml").write_bytes(CONFIG)
    with pytest.raises(ConfigError, match=r"^--data\.size .*cannot be read"):
        load_config(tmp_path / "good.yaml", ["--data.size", text])


def test_aliases_may_be_used():
    found = parse_yaml("a: &a {x: 1}\nb: {<<: *a, y: 2}", "text")
    assert found == {"a": {"x": 1}, "b": {"x": 1, "y": 2}}


@pytest.mark.parametrize("path", ["folder", "missing", "folder/x.yaml/y", "nul\0.yaml", "x" * 5000])
def test_a_config_path_that_is_no_file_is_one_line(tmp_path, path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "x.yaml").write_text("")
    with pytest.raises(ConfigError, match="cannot be read") as caught:
        load_config(tmp_path / path)
    assert str(caught.value).isprintable()


# Weights.

STATE = {"fc.weight": torch.ones(3, 4), "fc.bias": torch.zeros(3)}


def torch_bytes(value, **options) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **options)
    return file.getvalue()


def weights_or_refuse(path: Path) -> None:
    with allowing(BadFile, naming=path):
        state = read_state(str(path))
        load_state(torch.nn.ModuleDict({"fc": torch.nn.Linear(4, 3)}), state, "fc", str(path))


@fuzzed(50)
@given(
    content=mutated(
        torch_bytes(STATE),
        torch_bytes({"model": STATE}),
        torch_bytes(STATE, _use_new_zipfile_serialization=False),
    )
)
@example(content=b"")
@example(content=pickle.dumps({"fc.weight": print}))
@example(content=torch_bytes([1, 2]))
@example(content=torch_bytes({1: torch.ones(1)}))
@example(content=torch_bytes({"fc.weight": torch.tensor(1.0), "fc.bias": torch.tensor(1.0)}))
@example(content=torch_bytes({"fc.weight": torch.ones(3, 4).to_sparse(), "fc.bias": torch.zeros(3)}))
@example(content=torch_bytes({"fc.weight": torch.ones(7), "fc.bias": torch.zeros(3)}))
@example(content=torch_bytes({"\x1b[2J": torch.ones(7)}))
def test_damaged_torch_files_are_refused_by_name(folder, content):
    (folder / "w.pt").write_bytes(content)
    weights_or_refuse(folder / "w.pt")


@fuzzed(50)
@given(content=mutated(to_safetensors(STATE)))
@example(content=b"")
@example(content=b"\xff" * 8)
def test_damaged_safetensors_are_refused_by_name(folder, content):
    (folder / "w.safetensors").write_bytes(content)
    weights_or_refuse(folder / "w.safetensors")


# ReaL, predictions, annotations, ground truth.


@fuzzed(50)
@given(content=mutated(b"[[1, 2], [], [0]]", most=6) | JSON.map(lambda value: json.dumps(value).encode()))
@example(content=b"[" * 100_000)
@example(content=b"[[1], [-1]]")
@example(content=b"[[true]]")
@example(content=b'[["a"]]')
@example(content=b"[[null]]")
@example(content=b"[[[1]]]")
@example(content=b"[[1e5, NaN]]")
def test_damaged_real_labels_are_refused_by_name(folder, content):
    (folder / "real.json").write_bytes(content)
    with allowing(BadFile, naming="real.json"):
        real = read_real_labels(folder / "real.json")
        assert all(type(label) is int and label >= 0 for own in real for label in own)
        if len(real) >= 1 and max((label for own in real for label in own), default=0) < 5:
            match_real_labels(real, ["ILSVRC2012_val_00000001"], list("abcde"))


@pytest.fixture(scope="module")
def saved(folder):
    logits = np.linspace(-1, 1, 12, dtype=np.float16).reshape(4, 3)
    ranked = np.argsort(-logits, axis=1).astype(np.int64)
    labels = (ranked == 0).astype(np.int8)
    found = SavedPredictions(
        ids=np.arange(4),
        keys=tuple("abcd"),
        logits=logits,
        ranked=ranked,
        labels=labels,
        class_names=tuple("xyz"),
        about={"model": "m", "labels": "full", "missing": []},
    )
    found.save(folder / "predictions.zarr")
    files = sorted(file for file in (folder / "predictions.zarr").rglob("*") if file.is_file())
    return folder / "predictions.zarr", {file: file.read_bytes() for file in files}


@fuzzed(50)
@given(data=st.data())
def test_damaged_predictions_are_refused_by_name(saved, data):
    path, files = saved
    file = data.draw(st.sampled_from(sorted(files)))
    try:
        file.write_bytes(data.draw(mutated(files[file])))
        with allowing(BadFile, naming="predictions.zarr"):
            found = load_predictions(path)
            assert found.logits.shape == (len(found.keys), len(found.class_names))
    finally:
        file.write_bytes(files[file])


def npy(array) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


def npz(**arrays) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


LOGITS = np.ones((2, 3), np.float32)
NPY = npy(LOGITS)


@fuzzed(50)
@given(content=mutated(npz(logits=LOGITS, keys=np.array(["a", "b"]), labels=np.array([0, 2]))))
@example(content=npz(logits=LOGITS, keys=np.array("a")))
@example(content=npz(logits=np.float32(1), keys=np.array(["a"])))
@example(content=npz(logits=LOGITS, keys=np.array(["a", "b"]), class_names=np.array(1)))
@example(content=npz(logits=LOGITS, keys=np.array(["a", "b"]), labels=np.array(["a", "b"])))
@example(content=npz(logits=np.ones((2, 0), np.float32), keys=np.array(["a", "b"])))
def test_damaged_predictions_of_others_are_refused_by_name(folder, content):
    (folder / "p.npz").write_bytes(content)
    with allowing(BadFile, naming="p.npz"):
        load_predictions(folder / "p.npz")


@fuzzed(50)
@given(content=mutated(NPY), keys=mutated(b"a\nb\n"))
def test_damaged_arrays_of_others_are_refused_by_name(folder, content, keys):
    (folder / "good.npy").write_bytes(NPY)
    (folder / "bad.npy").write_bytes(content)
    (folder / "keys.txt").write_bytes(keys)
    for arguments in (
        {"path": folder / "bad.npy", "keys": folder / "keys.txt"},
        {"path": folder / "good.npy", "keys": folder / "bad.npy"},
        {"path": folder / "good.npy", "keys": folder / "keys.txt", "labels": folder / "bad.npy"},
    ):
        with allowing(BadFile, naming=folder):
            load_predictions(**arguments)


@pytest.fixture(scope="module")
def coco_folder(folder):
    train = {n: [(7 + n % 2, 1, 2, 3, 4)] for n in range(1, 6)}
    make_coco(folder / "coco", {"train2014": train, "val2014": {9: train[1]}}, [(7, "cat"), (8, "dog")])
    file = folder / "coco" / "annotations" / "instances_train2014.json"
    return file, file.read_bytes()


def prepare_or_refuse(prepare, source: Path) -> None:
    with allowing(BadFile, FileNotFoundError):
        prepare(source, protocol=PROTOCOL)


@fuzzed(50)
@given(data=st.data())
def test_damaged_coco_annotations_are_refused_by_name(folder, coco_folder, data):
    file, content = coco_folder
    file.write_bytes(data.draw(mutated(content)))
    prepare_or_refuse(lambda source, **options: coco(source, year=2014, **options), folder / "coco")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (b'"width": 40', b'"width": 0'),
        (b'"width": 40', b'"width": NaN'),
        (b'"width": 40', b'"width": "40"'),
        (b'"bbox": [1, 2, 3, 4]', b'"bbox": [1]'),
        (b'"bbox": [1, 2, 3, 4]', b'"bbox": [1e400, 2, 3, 4]'),
        (b'"name": "cat"', b'"name": 5'),
        (b'"name": "cat"', b'"name": "\\u001b[2J"'),
        (b'"file_name": "COCO', b'"file_name": "/etc/COCO'),
        (b'"file_name": "COCO', b'"file_name": "../COCO'),
        (b'"image_id": 1', b'"image_id": [1]'),
    ],
)
def test_impossible_coco_annotations_are_refused_by_name(folder, coco_folder, before, after):
    file, content = coco_folder
    assert before in content
    file.write_bytes(content.replace(before, after))
    with pytest.raises(BadFile, match="instances_train2014"):
        coco(folder / "coco", year=2014, protocol=PROTOCOL)


@pytest.fixture(scope="module")
def voc_folder(folder):
    images = {name: [("cat", 0, 1, 2, 3, 4)] for name in "abcdef"}
    make_voc(folder / "voc", images, {"train": list("abcde"), "val": ["f"]})
    files = [folder / "voc" / "Annotations" / "a.xml", folder / "voc" / "ImageSets" / "Main" / "train.txt"]
    return {file: file.read_bytes() for file in files}


@fuzzed(50)
@given(data=st.data())
def test_damaged_voc_annotations_are_refused_by_name(folder, voc_folder, data):
    file = data.draw(st.sampled_from(sorted(voc_folder)))
    try:
        file.write_bytes(data.draw(mutated(voc_folder[file])))
        prepare_or_refuse(lambda source, **options: voc(source, year=2012, **options), folder / "voc")
    finally:
        file.write_bytes(voc_folder[file])


@pytest.mark.parametrize("text", ["0", "-1", "nan", "inf", "1e999", ""])
def test_impossible_voc_sizes_are_refused_by_name(folder, voc_folder, text):
    file, content = next(iter(voc_folder.items()))
    try:
        file.write_bytes(content.replace(b"<width>40<", b"<width>" + text.encode() + b"<"))
        with pytest.raises(BadFile, match=r"a\.xml"):
            voc(folder / "voc", year=2012, protocol=PROTOCOL)
    finally:
        file.write_bytes(content)


@fuzzed(50)
@given(
    content=mutated(b"1\n2\n1\n", b"ImageId,Prediction\nx,n01 1 2 3 4\n", b"a.jpg cat\nb.jpg dog\n"),
    synsets=mutated(b"n01 tench\nn02 fish\n"),
)
@example(content=b"9" * 5000, synsets=b"n01")
@example(content="²\n".encode(), synsets=b"n01")
@example(content=b"\xff", synsets=b"n01")
def test_damaged_ground_truth_is_refused_by_name(folder, content, synsets):
    (folder / "truth.txt").write_bytes(content)
    (folder / "synsets.txt").write_bytes(synsets)
    for given_synsets in (None, folder / "synsets.txt"):
        with allowing(BadFile, naming=folder):
            read_ground_truth(folder / "truth.txt", given_synsets)
            read_synsets(folder / "synsets.txt")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_twenty_times_as_many_damages():
    """This file again, in a process of its own, because hypothesis fixes its settings at import."""
    command = [sys.executable, "-m", "pytest", __file__, "--timeout", "1200", "-p", "no:cacheprovider"]
    subprocess.run(command, env={**os.environ, "FUZZ": "20"}, check=True)
