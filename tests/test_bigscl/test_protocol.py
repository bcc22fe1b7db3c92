"""The single-positive protocol against published label files and the paper's tables."""

from pathlib import Path

import numpy as np
import pytest

from bigscl.datasets.multilabel import draw_given, split

DATA = Path(__file__).parents[3] / "shared" / "data"
VOC = DATA / "voc2012_labels" / "voc2012_spml.npz"
COCO = DATA / "coco2014_labels" / "coco2014_labels.npz"
needs_voc = pytest.mark.skipif(not VOC.exists(), reason="VOC-2012 label matrices are not here")
needs_coco = pytest.mark.skipif(not COCO.exists(), reason="COCO-2014 label matrices are not here")


@pytest.fixture(scope="module")
def voc():
    with np.load(VOC) as file:
        return dict(file)


@pytest.fixture(scope="module")
def coco():
    with np.load(COCO) as file:
        arrays = dict(file)
    for part in ("train", "val"):
        arrays[f"{part}_labels"] = np.unpackbits(arrays[part], axis=1)[:, :80]
    return arrays


def singles(labels):
    given, negatives = draw_given(labels)
    assert all(len(row) == 1 for row in given)
    assert not any(negatives)
    return np.array(given)[:, 0]


@needs_voc
@pytest.mark.parametrize("part", ["train", "val"])
def test_given_labels_of_voc_are_the_published_ones(voc, part):
    assert np.array_equal(singles(voc[f"{part}_labels"]), voc[f"{part}_obs_seed1200"])


@needs_coco
def test_given_labels_of_coco_are_the_published_ones(coco):
    assert np.array_equal(singles(coco["train_labels"]), coco["train_obs"])


def statistics(labels, names):
    """name -> (train, share of singles, val, share of singles): a row of the paper's table."""
    given = np.eye(labels.shape[1], dtype=int)[singles(labels)]
    columns = []
    for rows in split(len(labels)):
        total, kept = labels[rows].sum(axis=0, dtype=int), given[rows].sum(axis=0)
        columns += [total, 100 * kept // total]
    return {str(name): tuple(int(column[i]) for column in columns) for i, name in enumerate(names)}


# From appendix D of the paper, whose shares are percentages rounded down.
COCO_TABLE = {
    "person": (36192, 34, 8982, 34),
    "chair": (7138, 22, 1812, 21),
    "car": (6895, 30, 1711, 30),
    "clock": (2506, 50, 653, 47),
    "cat": (2267, 43, 551, 45),
    "train": (1958, 58, 506, 62),
    "giraffe": (1426, 80, 372, 82),
    "toothbrush": (570, 36, 130, 49),
    "bear": (531, 88, 137, 86),
    "hair drier": (103, 27, 25, 28),
}
VOC_TABLE = {
    "person": (1584, 59, 410, 66),
    "dog": (504, 83, 128, 82),
    "chair": (459, 49, 107, 39),
    "bird": (310, 93, 85, 98),
    "diningtable": (221, 45, 48, 43),
    "motorbike": (206, 65, 59, 50),
    "cow": (129, 86, 22, 90),
}


@pytest.mark.parametrize(
    ("name", "table", "sizes", "totals"),
    [
        pytest.param("voc", VOC_TABLE, (4574, 1143), (6665, 1666), marks=needs_voc),
        pytest.param("coco", COCO_TABLE, (65665, 16416), (193078, 47957), marks=needs_coco),
    ],
)
def test_split_and_statistics_are_the_published_ones(request, name, table, sizes, totals):
    data = request.getfixturevalue(name)
    labels, parts = data["train_labels"], split(sum(sizes))
    for part, rows, size, total in zip(("train", "val"), parts, sizes, totals, strict=True):
        assert np.array_equal(rows, data[f"split_{part}"])
        assert (len(rows), labels[rows].sum()) == (size, total)
    found = statistics(labels, data["names"])
    assert {each: found[each] for each in table} == table


def test_stream_of_draws_is_frozen():
    """Written down when the published files were reproduced, to be checked where these are not at hand."""
    labels = np.array([[1, 1, 0, 0, 1], [0, 1, 1, 1, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 1], [0, 0, 1, 1, 1]])
    positives, negatives = draw_given(labels, num_negatives=1)
    assert positives == [(0,), (1,), (3,), (0,), (4,)]
    assert negatives == [(3,), (0,), (), (2,), (0,)]
    assert [rows.tolist() for rows in split(12)] == [[0, 1, 2, 4, 5, 6, 7, 8, 10, 11], [3, 9]]


def random_labels(rows=200, classes=12):
    labels = np.random.default_rng(0).random((rows, classes)) < 0.3
    labels[labels.sum(axis=1) == 0, 0] = True
    return labels


def test_given_positives_are_among_the_labels_and_negatives_are_not():
    labels = random_labels()
    positives, negatives = draw_given(labels, num_positives=2, num_negatives=3)
    for row, present, absent in zip(labels, positives, negatives, strict=True):
        assert row[list(present)].all()
        assert not row[list(absent)].any()
        assert len(set(present)) == len(present) == min(2, row.sum())
        assert len(set(absent)) == len(absent) == min(3, (~row).sum())


def test_a_positive_more_adds_to_the_single_one():
    labels = random_labels()
    one, _ = draw_given(labels, num_positives=1)
    two, _ = draw_given(labels, num_positives=2, num_negatives=4)
    assert all(set(single) <= set(pair) for single, pair in zip(one, two, strict=True))


def test_every_positive_is_drawn_equally_often():
    labels = np.zeros((6000, 5), dtype=bool)
    labels[:, [0, 2, 4]] = True
    counts = np.bincount(singles(labels), minlength=5)
    assert counts[[1, 3]].sum() == 0
    assert np.abs(counts[[0, 2, 4]] - 2000).max() < 150


def test_seed_changes_the_draw():
    labels = random_labels()
    assert draw_given(labels, seed=1) != draw_given(labels, seed=2)
    assert not np.array_equal(split(100, seed=1)[1], split(100, seed=2)[1])


@pytest.mark.parametrize("counts", [(0, 0), (-1, 0), (1, -1)])
def test_numbers_of_given_labels_that_make_no_sense_are_refused(counts):
    with pytest.raises(ValueError, match="expected at least 1 and 0"):
        draw_given(random_labels(), num_positives=counts[0], num_negatives=counts[1])


@pytest.mark.parametrize("count", [1, 2, 3, 10, 12, 13, 999])
def test_split_parts_every_row_once(count):
    training, validation = split(count)
    assert sorted([*training, *validation]) == list(range(count))
    assert len(validation) == round(0.2 * count)
