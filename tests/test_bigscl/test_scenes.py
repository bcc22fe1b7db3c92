"""Scenes of digits: what their labels and boxes promise, checked on the pixels."""

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("sklearn")

from sklearn.datasets import load_digits

from bigscl.datasets.scenes import SIDE, Digit, Scene, scenes
from bigscl.datasets.writer import write

SIZES = {"single": 60, "train": 60, "val": 30, "test": 60}


@pytest.fixture(scope="module")
def made():
    return replace(scenes(SIZES, seed=0), samples_per_shard=20)


def all_scenes(made):
    return [sample for part in ("train", "val", "test") for sample in made.parts[part]]


def test_parts_have_the_sizes_asked_for_and_the_ten_classes(made):
    assert {part: len(samples) for part, samples in made.parts.items()} == SIZES
    assert made.classes == [str(digit) for digit in range(10)]


def test_source_digits_of_the_parts_are_disjoint(made):
    sources = {
        part: {digit.source for sample in samples for digit in sample.image.digits}
        for part, samples in made.parts.items()
    }
    for one, other in itertools.combinations(sources.values(), 2):
        assert not one & other


def test_singles_are_fully_labelled_and_scenes_show_one_of_two_to_four_labels(made):
    assert all(len(sample.label.full) == 1 for sample in made.parts["single"])
    assert all(sample.label.given == sample.label.full for sample in made.parts["single"])
    for sample in all_scenes(made):
        assert len(sample.label.given) == 1
        assert sample.label.given[0] in sample.label.full
    assert set(Counter(len(sample.label.full) for sample in all_scenes(made))) == {2, 3, 4}


def test_labels_are_the_classes_of_the_source_digits_each_once(made):
    targets = load_digits().target
    for sample in all_scenes(made):
        classes = [int(targets[digit.source]) for digit in sample.image.digits]
        assert sorted(classes) == list(sample.label.full)
        assert [box[0] for box in sample.label.boxes] == classes


def test_digits_lie_apart_and_inside_the_scene(made):
    for sample in all_scenes(made):
        covered = np.zeros((SIDE, SIDE), dtype=int)
        for digit in sample.image.digits:
            assert digit.left >= 0
            assert digit.top >= 0
            covered[digit.top : digit.top + digit.height, digit.left : digit.left + digit.width] += 1
        assert covered.max() == 1
        assert covered.sum() == sum(digit.width * digit.height for digit in sample.image.digits)


@pytest.mark.parametrize("part", ["single", "train"])
def test_boxes_hold_all_visible_ink(made, part):
    """What changes when the digits are taken away lies in the boxes, and reaches their edges."""
    for sample in made.parts[part][:20]:
        scene = sample.image
        without = Scene(seed=scene.seed, digits=())
        ink = np.abs(scene.pixels().astype(int) - without.pixels()).max(axis=2) > 40
        inside = np.zeros_like(ink)
        for _, *edges in sample.label.boxes:
            x0, y0, x1, y1 = (round(edge * SIDE) for edge in edges)
            inside[max(0, y0 - 2) : y1 + 2, max(0, x0 - 2) : x1 + 2] = True
            box = ink[y0:y1, x0:x1]
            rows, columns = np.flatnonzero(box.any(axis=1)), np.flatnonzero(box.any(axis=0))
            assert len(rows) > 0.7 * box.shape[0]
            assert len(columns) > 0.7 * box.shape[1]
        assert not (ink & ~inside).any()


def test_digits_are_drawn_upright_where_their_box_is():
    """The ink of a drawn digit is the source digit, enlarged, and neither mirrored nor turned."""
    source = 11
    scene = Scene(seed=(1,), digits=(Digit(source=source, left=10, top=4, width=24, height=32),))
    background = Scene(seed=(1,), digits=()).pixels().astype(float)
    ink = np.abs(scene.pixels() - background).mean(axis=2)[4:36, 10:34].reshape(8, 4, 8, 3).mean(axis=(1, 3))
    shape = load_digits().images[source]
    similarity = {
        name: np.corrcoef(ink.ravel(), other.ravel())[0, 1]
        for name, other in {"same": shape, "mirrored": shape[:, ::-1], "turned": shape[::-1, ::-1]}.items()
    }
    assert similarity["same"] > 0.85
    assert similarity["same"] == max(similarity.values())


def test_the_seed_decides_everything(tmp_path):
    sizes = {"single": 5, "train": 5, "val": 5, "test": 5}
    for name, seed in (("one", 3), ("same", 3), ("other", 4)):
        list(write(replace(scenes(sizes, seed=seed), samples_per_shard=2), tmp_path / name))
    files = {
        name: [path.read_bytes() for path in sorted((tmp_path / name).glob("*.tar"))]
        for name in ("one", "same", "other")
    }
    assert files["one"] == files["same"]
    assert all(one != other for one, other in zip(files["one"], files["other"], strict=True))


def test_a_larger_part_begins_with_the_smaller_one():
    small = scenes(dict.fromkeys(SIZES, 3), seed=0)
    large = scenes(dict.fromkeys(SIZES, 6), seed=0)
    assert [s.image for s in small.parts["train"]] == [s.image for s in large.parts["train"][:3]]
