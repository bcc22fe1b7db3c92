"""Saved predictions: what comes back is what was saved, and other tools' logits do as well."""

import numpy as np
import pytest
import zarr

from bigscl.data.build_index import scan
from bigscl.data.index import true_labels
from bigscl.evaluation.inference import Predictions
from bigscl.evaluation.predictions import from_network, load_predictions
from tests.builders import labelled, write_shards, write_tar


@pytest.fixture
def index(tmp_path):
    """Two shards of unequal size; every sample has full labels."""
    one = [*labelled("é/a", 0, full=[0, 2], given=[2]), *labelled("b", 1, full=[1])]
    paths = [write_tar(tmp_path / "t-0.tar", one), write_tar(tmp_path / "t-1.tar", labelled("c", 2, full=[]))]
    return scan([str(path) for path in paths], num_classes=3)[0]


def found_for(index, rows=slice(None)):
    logits = np.random.default_rng(0).normal(size=(index.num_samples, index.num_classes)).astype(np.float32)
    return Predictions(ids=index.ids()[rows], logits=logits[rows], map_logits=-2 * logits[rows])


def test_what_is_saved_comes_back(index, tmp_path):
    found = found_for(index)
    saved = from_network(found, index, {"model": "net"})
    saved.save(tmp_path / "out" / "predictions.zarr")
    for path in (tmp_path / "out", tmp_path / "out" / "predictions.zarr"):
        loaded = load_predictions(path)
        assert loaded.keys == ("é/a", "b", "c")
        assert loaded.labels.tolist() == [[1, 0, 1], [0, 1, 0], [0, 0, 0]]
        assert np.array_equal(loaded.logits, found.logits.astype(np.float16))
        assert np.array_equal(loaded.ranked, np.argsort(-found.logits, axis=1))
        assert loaded.poolings == ("plain", "map")
        assert loaded.pooled("plain") is loaded
        assert np.array_equal(loaded.pooled("map").logits, found.map_logits.astype(np.float16))
        assert np.array_equal(loaded.pooled("map").ranked, np.argsort(found.logits, axis=1))
        assert loaded.ids.tolist() == index.ids().tolist() == [0, 1, 2]
        assert loaded.class_names == index.class_names
        assert loaded.about == {"model": "net", "labels": "full", "missing": []}


def test_saved_predictions_are_plain_zarr_in_half_precision(index, tmp_path):
    from_network(found_for(index), index, {"model": "net"}).save(tmp_path / "p.zarr")
    group = zarr.open_group(tmp_path / "p.zarr", mode="r")
    assert {name: str(array.dtype) for name, array in group.arrays()} == {
        "ids": "int64",
        # numpy 1 has no type for strings of any length.
        "keys": "StringDType()" if np.lib.NumpyVersion(np.__version__) >= "2.0.0" else "object",
        "labels": "int8",
        "logits": "float16",
        "ranked": "int64",
        "map_logits": "float16",
        "map_ranked": "int64",
    }


def test_saving_again_replaces_what_was_there(index, tmp_path):
    from_network(found_for(index), index, {"model": "old"}).save(tmp_path / "p.zarr")
    from_network(found_for(index, slice(2)), index, {"model": "new"}).save(tmp_path / "p.zarr")
    assert load_predictions(tmp_path / "p.zarr").about["model"] == "new"
    assert [path.name for path in tmp_path.iterdir() if "p.zarr" in path.name] == ["p.zarr"]


def test_images_without_a_prediction_are_named(index):
    saved = from_network(found_for(index, [1]), index, {"model": "net"})
    assert saved.keys == ("b",)
    assert saved.about["missing"] == ["é/a", "c"]


def test_logits_too_large_for_half_precision_stay_finite_and_in_order(index):
    found = Predictions(ids=index.ids(), logits=np.array([[1e6, 2e6, -1e6]] * 3, np.float32))
    saved = from_network(found, index, {"model": "net"})
    assert np.isfinite(saved.logits).all()
    assert saved.ranked[0].tolist() == [1, 0, 2]


def test_shards_with_one_class_per_image_are_scored_as_if_others_were_absent(tmp_path):
    index = scan(write_shards(tmp_path, [3], num_classes=3))[0]
    labels, which = true_labels(index, index.ids())
    assert which == "given"
    assert labels.tolist() == np.eye(3, dtype=int).tolist()


def test_logits_of_other_tools_come_with_keys_and_labels(tmp_path):
    logits = np.random.default_rng(0).normal(size=(4, 3))
    np.savez(tmp_path / "a.npz", logits=logits, keys=["a", "b", "c", "d"], labels=[0, 1, 2, 0])
    np.save(tmp_path / "b.npy", logits)
    np.save(tmp_path / "labels.npy", np.eye(3, dtype=np.int64)[[0, 1, 2, 0]])
    (tmp_path / "keys.txt").write_text("a\nb\nc\nd\n")
    one = load_predictions(tmp_path / "a.npz")
    other = load_predictions(tmp_path / "b.npy", keys=tmp_path / "keys.txt", labels=tmp_path / "labels.npy")
    assert one.keys == other.keys == ("a", "b", "c", "d")
    assert np.array_equal(one.logits, logits)
    assert np.array_equal(one.labels, other.labels)
    assert one.class_names == ("0", "1", "2")


@pytest.mark.parametrize(
    ("arrays", "complaint"),
    [
        ({"logits": np.zeros((2, 3))}, "no keys"),
        ({"keys": ["a"]}, "no logits"),
        ({"logits": np.zeros((2, 3)), "keys": ["a"]}, "1 keys"),
        ({"logits": np.zeros((2, 3), int), "keys": ["a", "b"]}, "floating-point"),
        ({"logits": np.zeros((2, 3)), "keys": ["a", "b"], "labels": [0, 3]}, "from 0 to 3 of 3 classes"),
        ({"logits": np.zeros((2, 3)), "keys": ["a", "b"], "labels": np.full((2, 3), 2)}, "1 .positive."),
        ({"logits": np.zeros((2, 3)), "keys": np.array(["a", None], object)}, "plain arrays"),
    ],
)
def test_files_that_hold_no_predictions_are_refused(tmp_path, arrays, complaint):
    np.savez(tmp_path / "bad.npz", **arrays)
    with pytest.raises(ValueError, match=complaint):
        load_predictions(tmp_path / "bad.npz")
