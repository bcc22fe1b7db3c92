"""Reports: against scikit-learn, against published figures, and honest about what is missing."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn import metrics as sklearn

from bigscl.data.labels.real_labels import match_real_labels, read_real_labels, read_reviewed_labels
from bigscl.evaluation.metrics import best_classes
from bigscl.evaluation.predictions import SavedPredictions
from bigscl.evaluation.report import make_report
from bigscl.evaluation.report_files import main_table, summary, to_json, to_markdown, write_report
from tests.builders import DATA, real_data

TOP5 = DATA / "in_val_top5_dev"


def saved(logits, labels, *, keys=None, missing=(), **about):
    logits = np.ascontiguousarray(logits)
    ranked = best_classes(torch.from_numpy(logits), min(10, logits.shape[1])).numpy()
    return SavedPredictions(
        ids=np.arange(len(logits)),
        keys=tuple(keys or (f"image{n}" for n in range(len(logits)))),
        logits=logits,
        ranked=ranked,
        labels=None if labels is None else np.ascontiguousarray(labels, np.int8),
        class_names=tuple(f"class{i}" for i in range(logits.shape[1])),
        about={"model": "net", "labels": "full", "missing": list(missing), **about},
    )


def problem(num_images=400, num_classes=12, seed=0):
    """Half-precision logits that know something of the labels, with ties; some images have no label."""
    random = np.random.default_rng(seed)
    labels = random.random((num_images, num_classes)) < 0.15
    logits = (random.normal(-2, 1.5, labels.shape) + 2 * labels).round(1).astype(np.float16)
    return logits, labels.astype(np.int8)


def test_multi_label_figures_equal_scikit_learn():
    logits, labels = problem()
    report = make_report(saved(logits, labels))
    truth, scores = labels.astype(bool), logits.astype(np.float64)
    precisions = sklearn.average_precision_score(truth, scores, average=None)
    assert [one.average_precision for one in report.per_class] == pytest.approx(precisions)
    assert report.mean_ap.present == pytest.approx(precisions.mean())
    predicted = scores >= 0
    for average, prefix in (("micro", "overall"), ("macro", "class")):
        precision, recall, _, _ = sklearn.precision_recall_fscore_support(
            truth, predicted, average=average, zero_division=0
        )
        assert getattr(report.at_threshold, f"{prefix}_precision") == pytest.approx(precision)
        assert getattr(report.at_threshold, f"{prefix}_recall") == pytest.approx(recall)
    assert report.at_threshold.overall_f1 == pytest.approx(
        sklearn.f1_score(truth, predicted, average="micro")
    )


@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_decisions_by_count_do_not_depend_on_the_level_of_the_scores(activation):
    logits, labels = problem()
    # With ties, more scores than labels reach the threshold.
    logits = logits + np.random.default_rng(2).normal(0, 0.01, logits.shape).astype(np.float32)
    report, higher = (make_report(saved(one, labels), activation=activation) for one in (logits, logits + 5))
    assert report.at_count.overall_precision == report.at_count.overall_recall
    assert higher.at_count.overall_f1 == pytest.approx(report.at_count.overall_f1, abs=0.005)
    if activation == "sigmoid":
        assert higher.count_threshold > report.count_threshold
        assert higher.at_threshold.overall_f1 < report.at_count.overall_f1
    without = make_report(saved(logits, np.zeros_like(labels)), activation=activation)
    assert math.isnan(without.count_threshold)
    assert "as many as labels" not in to_markdown(without)
    row = f"| as many as labels: score of {report.count_threshold:.2f} and more |"
    assert row in to_markdown(report)


def test_top_1_is_taken_from_the_full_precision_ranking_where_halves_tie():
    exact = np.array([[10.001, 10.002, 0], [10.002, 10.001, 0]], np.float32)
    assert np.array_equal(exact.astype(np.float16)[0, :2], exact.astype(np.float16)[1, :2])
    report = make_report(
        SavedPredictions(
            ids=np.arange(2),
            keys=("a", "b"),
            logits=exact.astype(np.float16),
            ranked=np.argsort(-exact, axis=1),
            labels=np.array([[0, 1, 0], [1, 0, 0]], np.int8),
            class_names=("x", "y", "z"),
            about={"model": "net", "labels": "full", "missing": []},
        )
    )
    assert report.top1 == report.by_num_labels["all"].top1 == report.at_k["1"].overall_precision == 1.0


def test_softmax_ranks_images_by_share_and_sigmoid_by_logit():
    logits = np.array([[5.0, 5.0], [4.0, -4.0]], np.float32)
    labels = np.array([[0, 1], [1, 0]])
    sigmoid, softmax = (make_report(saved(logits, labels), activation=a) for a in ("sigmoid", "softmax"))
    assert [one.average_precision for one in sigmoid.per_class] == [0.5, 1.0]
    assert [one.average_precision for one in softmax.per_class] == [1.0, 1.0]
    assert sigmoid.at_threshold.overall_precision == pytest.approx(2 / 3)
    # A share of exactly one half is a prediction; in float32 its logarithm is not below that of 0.5.
    assert softmax.at_threshold.overall_recall == 1.0


def test_a_report_in_json_has_six_digits_and_null_for_what_cannot_be_said():
    labels = np.array([[1, 0], [1, 0], [0, 0]])
    values = to_json(make_report(saved(np.array([[0.2, -1], [0.1, 3], [0.3, 1]]), labels)))
    absent = values["per_class"][1]
    assert absent["average_precision"] is None
    assert values["per_class"][0]["average_precision"] == 0.583333
    assert values["by_num_labels"]["4+"]["top1"] is None
    assert json.loads(json.dumps(values)) == values


def test_the_report_to_read_names_images_without_a_prediction_first():
    logits, labels = problem(num_images=30)
    whole = to_markdown(make_report(saved(logits, labels)))
    assert whole.splitlines()[0] == "# net on 30 images"
    lost = [f"lost{n}" for n in range(12)]
    partial = to_markdown(make_report(saved(logits, labels, missing=lost)))
    assert partial.splitlines()[0] == "# PARTIAL, 30 of 42 images: net on 30 images"
    assert "12 images without a prediction: lost0, lost1" in partial
    assert "lost9 and 2 more" in partial


def test_localization_is_shown_where_it_was_measured():
    logits, labels = problem(num_images=30)
    found = {"num_pairs": 7, "hit_rate": 0.5, "energy": None, "chance": 0.25}
    report = make_report(saved(logits, labels, localization={"network maps": {"all": found}}))
    assert "| network maps | all | 7 | 50.00 | – | 25.00 |" in to_markdown(report)
    assert "pointing" in summary(report)


def test_files_of_a_report_are_complete_and_the_picture_has_a_panel_per_rank(tmp_path):
    logits, labels = problem()
    write_report(make_report(saved(logits, labels)), tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == [
        "report.json",
        "report.md",
        "scores.png",
    ]
    with Image.open(tmp_path / "new" / "scores.png") as picture:
        pixels = np.asarray(picture.convert("RGB")).astype(int)
    blue = (pixels[..., 2] - pixels[..., 0]) > 80
    quarters = np.array_split(blue.any(0), 4)
    assert all(quarter.any() for quarter in quarters)


# ReaL


def image(number):
    return f"ILSVRC2012_val_{number:08d}"


REAL = [[0], [], [1, 2], [2], [0, 1, 2]]


def test_real_labels_are_matched_by_number_in_key_or_path_never_by_order():
    names = [f"c{i}" for i in range(3)]
    keys = [f"val/n01440764/{image(3)}", f"n01440764_{image(1)}", f"{image(5)}.JPEG", image(2), image(4)]
    found = match_real_labels(REAL, keys, names)
    assert found.labels.tolist() == [[0, 1, 1], [1, 0, 0], [1, 1, 1], [0, 0, 0], [0, 0, 1]]
    assert found.missing == ()
    assert found.num_images == 5


def test_shuffled_images_give_the_same_real_report():
    random = np.random.default_rng(0)
    logits, labels = random.normal(size=(5, 3)).astype(np.float16), np.eye(3, dtype=np.int8)[[0, 1, 2, 2, 0]]
    order = [3, 0, 4, 2, 1]
    keys = [image(n + 1) for n in range(5)]
    one = make_report(saved(logits, labels, keys=keys), real_labels=REAL)
    other = make_report(saved(logits[order], labels[order], keys=[keys[n] for n in order]), real_labels=REAL)
    assert to_json(one) == to_json(other)
    assert one.num_images == 4
    assert one.original.num_images == 5


def test_a_partial_validation_set_says_so_in_the_first_line_and_names_what_is_missing():
    report = make_report(saved(np.eye(3)[:2], np.eye(3)[:2], keys=[image(1), image(4)]), real_labels=REAL)
    assert report.missing == (image(2), image(3), image(5))
    first = to_markdown(report).splitlines()[0]
    assert first.startswith("# PARTIAL, 2 of 5 images")
    assert f"{image(2)}, {image(3)}, {image(5)}" in to_markdown(report)


@pytest.mark.parametrize(
    ("keys", "names", "complaint"),
    [
        ([image(1), "a/" + image(1)], "abc", f"more than once: {image(1)}"),
        ([image(1), "photo7"], "abc", "1 of 2 keys name no ILSVRC2012_val image, as 'photo7'"),
        ([image(1), image(6)], "abc", "ReaL has 5 images only"),
        ([image(1)], "ab", "ReaL has class 2"),
        ([image(1)], ["n00000002", "n00000001", "n00000003"], "sorted wnid"),
    ],
)
def test_images_that_cannot_be_matched_are_refused(keys, names, complaint):
    with pytest.raises(ValueError, match=complaint):
        match_real_labels(REAL, keys, names)


def test_predictions_without_labels_need_real(tmp_path):
    predictions = saved(np.eye(3), None, keys=[image(n) for n in (1, 3, 4)])
    with pytest.raises(ValueError, match="no labels to score against"):
        make_report(predictions)
    report = make_report(predictions, real_labels=REAL)
    assert report.original is None
    assert "| net | – | – | 100.00 |" in to_markdown(report)


def real_predictions(name):
    """The top-5 predictions of a published model as logits; classes below the top five all tie."""
    with np.load(TOP5 / "top5.npz") as models:
        best = models[name]
    logits = np.zeros((len(best), 1000), np.float16)
    logits[np.arange(len(best))[:, None], best] = np.arange(5, 0, -1)
    return logits


def check_published(name):
    logits = real_predictions(name)
    expected = json.loads((TOP5 / "expected.json").read_text())[name]
    labels = np.eye(1000, dtype=np.int8)[np.load(TOP5 / "val_labels.npy")]
    names = (TOP5 / "wnids.txt").read_text().split()
    order = np.random.default_rng(1).permutation(len(logits))
    predictions = saved(logits[order], labels[order], keys=[image(n + 1) for n in order])
    report = make_report(
        replace(predictions, class_names=tuple(names)), real_labels=read_real_labels(DATA / "real.json")
    )
    found = [report.original.top1, report.original.top5, report.top1, report.top5]
    assert [100 * value for value in found] == pytest.approx(
        [expected[key] for key in ("top1", "top5", "real_top1", "real_top5")], abs=0.01
    )
    sizes = [report.by_num_labels[k].num_images for k in ("all", "1", "2", "3", "4+")]
    assert sizes == [46837, 39394, 5408, 1319, 716]
    assert report.missing == ()


@real_data
def test_a_published_model_gets_its_published_imagenet_and_real_accuracies():
    check_published("senet154")


def test_columns_without_images_have_dashes():
    logits, labels = problem()
    single = np.zeros_like(labels)
    single[np.arange(len(single)), labels.argmax(1)] = 1
    lines = main_table([make_report(saved(logits, single))]).splitlines()
    images, _, present, zeros = (line.split(" | ")[-3:] for line in lines[2:6])
    assert [count.strip(" |") for count in images] == ["0", "0", "0"]
    for cells in (present, zeros):
        assert [cell.strip(" |") for cell in cells] == ["–", "–", "–"]


def test_a_pooling_is_scored_as_its_logits_are_with_both_side_by_side():
    logits, labels = problem()
    other, _ = problem(seed=1)
    both = pooled_twice(logits, other, labels)
    for pooling, alone in (
        ("plain", make_report(saved(logits, labels))),
        ("map", make_report(saved(other, labels))),
    ):
        report = make_report(both, pooling=pooling)
        for name in (
            "top1",
            "top5",
            "mean_ap",
            "image_ap",
            "at_threshold",
            "count_threshold",
            "at_count",
            "at_k",
            "per_class",
            "by_num_labels",
        ):
            assert getattr(report, name) == getattr(alone, name), name
        assert report.poolings["plain"] == make_report(saved(logits, labels)).poolings["plain"]
        assert report.poolings[pooling] == alone.poolings["plain"]
        assert set(report.poolings) == {"plain", "map"}
    assert make_report(both).headline == "net on 400 images"
    assert make_report(both, pooling="map").headline == "net, map pooling on 400 images"
    assert "| pooling | mAP |" in summary(make_report(both))
    assert "pooling" not in summary(make_report(saved(logits, labels)))


def test_map_pooling_of_predictions_without_it_is_refused_in_words():
    with pytest.raises(
        ValueError, match=r"net: pooling map, but only plain logits were saved.* Evaluate again"
    ):
        make_report(saved(*problem()), pooling="map")


def pooled_twice(logits, other, labels, **about):
    """Predictions with two poolings."""
    plain, pooled = saved(logits, labels, **about), saved(other, labels)
    return replace(plain, map_logits=pooled.logits, map_ranked=pooled.ranked)


# Reviewed labels

WNIDS = ["n00000001 tench", "n00000002 goldfish", "n00000003 shark"]
ANNOTATIONS = {
    f"{image(1)}.JPEG": {"correct": ["n00000001"], "wrong": ["n00000002"]},
    f"{image(2)}.JPEG": {"correct": ["n00000001"], "unclear": ["n00000003"]},
    f"{image(3)}.JPEG": {"correct": ["n00000003", "n00000002"]},
    f"{image(4)}.JPEG": {"wrong": ["n00000001"], "unclear": ["n00000002"]},
    f"{image(5)}.JPEG": {"correct": ["n00000002"]},
    "imagenet_v2_1.jpeg": {"correct": ["n00000001"]},
}


def reviewed_file(tmp_path, content):
    path = tmp_path / "human_accuracy.json"
    path.write_text(json.dumps(content))
    return path


def test_reviewed_labels_leave_out_problematic_images_and_those_without_a_correct_class(tmp_path):
    published = {"initial_annots": ANNOTATIONS, "problematic_images": {f"{image(5)}.JPEG": ["drawing"]}}
    found = read_reviewed_labels(reviewed_file(tmp_path, published), WNIDS)
    assert {number: (set(one.correct), set(one.unclear)) for number, one in found.items()} == {
        1: ({0}, set()),
        2: ({0}, {2}),
        3: ({1, 2}, set()),
    }
    assert 5 in read_reviewed_labels(reviewed_file(tmp_path, ANNOTATIONS), WNIDS)


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 4], [4, 2, 0, 3, 1]])
def test_multi_label_accuracy_is_the_mean_over_classes_and_unclear_classes_are_right(tmp_path, order):
    labels_of = read_reviewed_labels(reviewed_file(tmp_path, ANNOTATIONS), WNIDS)
    best = np.array([1, 2, 1, 1, 1])  # wrong, unclear, correct, not evaluated, correct
    own = np.array([0, 0, 2, 1, 0])
    keys = [image(n + 1) for n in order]
    predictions = saved(np.eye(3)[best[order]], np.eye(3)[own[order]], keys=keys)
    found = make_report(predictions, reviewed_labels=labels_of).reviewed
    # Class 0 has three images of which two are right, class 2 one that is right.
    assert (found.num_images, found.top1) == (4, 0.75)
    assert found.class_top1 == pytest.approx((2 / 3 + 1) / 2)
    report = make_report(predictions, reviewed_labels=labels_of)
    assert "reviewed: 83.33 (mean over classes; over images 75.00), of 4 images" in to_markdown(report)
    assert make_report(predictions).reviewed is None


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ({image(1): {"correct": ["n00000009"]}}, "class 'n00000009' is none of the 3 classes"),
        ({image(1): {"correct": [3]}}, "class 3 is none of the 3 classes"),
        ([1], "not reviewed labels in JSON"),
    ],
)
def test_files_that_are_not_reviewed_labels_are_refused(tmp_path, content, complaint):
    with pytest.raises(ValueError, match=complaint):
        read_reviewed_labels(reviewed_file(tmp_path, content), WNIDS)
