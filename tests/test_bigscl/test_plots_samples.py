import numpy as np
import pytest

from bigscl.evaluation.sample_plots import (
    DIM,
    Panel,
    SamplePicture,
    classes_to_show,
    figure_of,
    is_inside,
    kinds_of,
    overlay,
    panel_of,
    peak_of,
)
from bigscl.store import Rows

NAMES = ["ant", "bee", "cow", "dog", "elk"]


def panels_of(memory, names, *, kinds, boxes=None, count=6):
    return [panel_of(memory, number, names, kinds, boxes) for number in classes_to_show(memory, kinds, count)]


def rows(scores, classes=None, heatmaps=True):
    maps = len(scores) if classes is None else len(classes)
    arrays = {"scores": np.array([scores], np.float16), "last_epoch": np.zeros(1, np.int32)}
    if heatmaps:
        arrays["heatmaps"] = np.random.default_rng(0).random((1, maps, 4, 4)).astype(np.float16)
    if classes is not None:
        arrays["classes"] = np.array([classes], np.uint16)
    return Rows(**arrays)


def mask(*classes):
    return np.isin(np.arange(len(NAMES)), classes)


def kinds(annotated, present):
    return kinds_of(annotated, present=present)


def grey(height=24, width=36, value=128):
    return np.full((3, height, width), value, np.uint8)


def sample(panels=3, height=24, width=36):
    panel = Panel(heatmap=np.full((4, 4), 0.5, np.float16), name="ant", score=0.5, kind="annotated")
    return SamplePicture(image=grey(height, width), title="train-0/k1", panels=[panel] * panels)


def shown(panels):
    return [(panel.name, panel.kind) for panel in panels]


def test_annotated_come_first_then_unannotated_then_negatives_each_by_score():
    panels = panels_of(rows([0.1, 0.5, 0.9, 0.7, 0.3]), NAMES, kinds=kinds(mask(0), mask(0, 1, 3)))
    assert shown(panels) == [
        ("ant", "annotated"),
        ("dog", "unannotated"),
        ("bee", "unannotated"),
        ("cow", "negative"),
        ("elk", "negative"),
    ]
    assert [panel.score for panel in panels] == pytest.approx([0.1, 0.7, 0.5, 0.9, 0.3], abs=1e-3)


def test_the_last_place_is_left_for_a_negative():
    memory = rows([0.1, 0.5, 0.9, 0.7, 0.3])
    panels = panels_of(memory, NAMES, kinds=kinds(mask(0, 1), mask(0, 1, 3)), count=3)
    assert shown(panels) == [("bee", "annotated"), ("ant", "annotated"), ("cow", "negative")]
    everything = panels_of(memory, NAMES, kinds=kinds(mask(0, 1), mask(0, 1, 2, 3, 4)), count=3)
    assert shown(everything)[-1] == ("cow", "unannotated")


def test_each_panel_has_the_heatmap_and_the_boxes_of_its_class():
    memory = rows([0.1, 0.5, 0.9, 0.7, 0.3], classes=[1, 3])
    box = (0.1, 0.2, 0.3, 0.4)
    panels = panels_of(memory, NAMES, kinds=kinds(mask(1), mask(1)), boxes={3: [box]})
    assert shown(panels) == [("bee", "annotated"), ("dog", "negative")]
    for place, panel in enumerate(panels):
        np.testing.assert_array_equal(panel.heatmap, memory.heatmaps[0, place])
    assert [panel.boxes for panel in panels] == [(), (box,)]


def test_a_class_whose_heatmap_is_not_kept_shows_its_score_and_no_heat():
    memory = rows([0.1, 0.5, 0.9, 0.7, 0.3], classes=[1, 3])
    panel = panel_of(memory, 2, NAMES, kinds(mask(2), mask(2)))
    assert (panel.name, panel.kind, panel.score) == ("cow", "annotated", pytest.approx(0.9, abs=1e-3))
    assert not panel.heatmap.any()


def test_a_memory_without_heatmaps_has_no_panels():
    assert panels_of(rows([0.1] * 5, heatmaps=False), NAMES, kinds=kinds(mask(0), mask(0))) == []


def test_heat_lies_where_the_heatmap_has_it():
    heatmap = np.zeros((4, 4), np.float16)
    heatmap[0, 3] = 1
    pixels = overlay(grey(), heatmap)
    assert pixels.shape == (24, 36, 3)
    warmth = pixels.max(axis=2).astype(int) - pixels.min(axis=2)
    assert warmth[:6, 27:].mean() > 50
    assert warmth[12:].max() == 0
    assert (pixels[12:] == round(DIM * 128)).all()


@pytest.mark.parametrize(("count", "across"), [(0, 1), (1, 0), (400, 1)])
def test_what_fits_on_no_page_is_refused(count, across):
    with pytest.raises(ValueError, match="picture: "):
        figure_of([sample()] * count, across=across)


def test_without_full_labels_nothing_is_called_negative_that_is_only_not_annotated():
    found = kinds_of(mask(0), expected=mask(0, 1), negatives=mask(2))
    assert found == ["annotated", "expected", "negative", "unknown", "unknown"]
    memory = rows([0.1, 0.5, 0.9, 0.7, 0.3])
    shown_ = shown(panels_of(memory, NAMES, kinds=found, count=3))
    assert shown_ == [("ant", "annotated"), ("bee", "expected"), ("cow", "negative")]
    texts = texts_of(figure_of([with_panels(panels_of(memory, NAMES, kinds=found))]))
    assert "not annotated" in texts
    assert "not annotated, expected" in texts


@pytest.mark.parametrize(("box", "mark"), [((0.5, 0.0, 1.0, 0.5), "o"), ((0.0, 0.5, 0.5, 1.0), "x")])
def test_the_hottest_cell_is_marked_inside_or_outside_its_box(box, mark):
    heatmap = np.zeros((4, 4), np.float16)
    heatmap[1, 2] = 0.7
    assert peak_of(heatmap) == (0.625, 0.375)
    assert is_inside((0.625, 0.375), [box]) is (mark == "o")
    panel = Panel(heatmap=heatmap, name="ant", score=0.5, kind="annotated", boxes=(box,))
    figure = figure_of([with_panels([panel])])
    assert {line.get_marker() for line in figure.axes[0].lines} == {mark}
    assert any("hottest cell: o inside, x outside" in text for text in texts_of(figure))


def with_panels(panels):
    return SamplePicture(image=grey(), title="train-0/k1", panels=[*panels, *sample(4).panels][:8])


def texts_of(figure):
    return [text.get_text() for text in figure.axes[0].texts]
