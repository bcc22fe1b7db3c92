"""Metrics against scikit-learn, against plain loops, and against published figures on real predictions."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import metrics as sklearn_metrics

from bigscl.evaluation.localization import energy_in_boxes, pointing_hits
from bigscl.evaluation.metrics import (
    SMALL,
    average_precision,
    best_classes,
    by_num_labels,
    image_average_precision,
    mean_ap,
    per_class,
    precision_recall_at_k,
    precision_recall_at_threshold,
    score_distribution,
    threshold_by_count,
    top_k_accuracy,
)
from bigscl.selection.k import estimate_k

DATA = Path(__file__).parents[3] / "shared" / "data"
needs_data = pytest.mark.skipif(not (DATA / "real.json").exists(), reason="no real data beside the project")


def sklearn_average_precision(scores, targets):
    """One class after another; NaN where a class has no positive, for which scikit-learn warns and says 0."""
    values = []
    for i in range(scores.shape[1]):
        known = targets[:, i] >= 0
        positive = targets[known, i] > 0
        score = (
            sklearn_metrics.average_precision_score(positive, scores[known, i])
            if positive.any()
            else math.nan
        )
        values.append(score)
    return np.array(values)


def multi_hot(labels, num_classes):
    """Targets [N,L] from a list of positive classes per image."""
    targets = torch.zeros(len(labels), num_classes, dtype=torch.int8)
    for row, own in zip(targets, labels, strict=True):
        row[own] = 1
    return targets


def random_problem(num_images, num_classes, *, levels=None, seed=0, share=0.1):
    """Scores that know something of the targets, in so many distinct levels."""
    rng = np.random.default_rng(seed)
    targets = (rng.random((num_images, num_classes)) < share).astype(np.int8)
    scores = 1 / (1 + np.exp(-rng.normal(targets * 1.5, 1)))
    scores = np.floor(scores * levels) / levels if levels else scores
    return torch.from_numpy(scores.astype(np.float32)), torch.from_numpy(targets)


@pytest.mark.parametrize("levels", [None, 1, 2, 10])
@pytest.mark.parametrize(("num_images", "num_classes"), [(500, 30), (1, 5), (2, 200), (3000, 1)])
def test_average_precision_equals_scikit_learn(num_images, num_classes, levels):
    scores, targets = random_problem(num_images, num_classes, levels=levels)
    expected = sklearn_average_precision(scores.numpy(), targets.numpy())
    np.testing.assert_allclose(average_precision(scores, targets), expected, atol=1e-12)


@pytest.mark.parametrize("levels", [None, 20])
def test_average_precision_of_many_scores_equals_scikit_learn(levels):
    """Enough of them for threads; classes whose positives are found by passes, by sorting, or by both."""
    scores, targets = random_problem(4000, 270, levels=levels, share=0.02)
    assert scores.numel() > SMALL
    positive = targets > 0
    scores[:, :90] = torch.where(positive, 0.5 + scores / 2, scores / 2)[:, :90]
    scores[:, 90:120] = torch.where(positive, scores / 2, 0.5 + scores / 2)[:, 90:120]
    targets[::7, 5:200] = -1
    expected = sklearn_average_precision(scores.numpy(), targets.numpy())
    found = average_precision(scores.requires_grad_(), targets)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert not found.requires_grad


@settings(max_examples=100, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    num_images=st.integers(1, 40),
    levels=st.sampled_from([1, 2, 5, 1000]),
    share=st.sampled_from([0.0, 0.1, 0.5, 1.0]),
)
def test_average_precision_leaves_unknown_pairs_out(seed, num_images, levels, share):
    scores, targets = random_problem(num_images, 4, levels=levels, seed=seed, share=share)
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(seed)) < 0.3] = -1
    expected = sklearn_average_precision(scores.numpy(), targets.numpy())
    np.testing.assert_allclose(average_precision(scores, targets), expected, atol=1e-12)


@pytest.mark.parametrize("levels", [None, 2, 10])
def test_average_precision_of_an_image_equals_scikit_learn(levels):
    scores, targets = random_problem(200, 30, levels=levels)
    found = image_average_precision(scores, targets)
    labelled = targets.any(1)
    assert 0 < labelled.sum() < 200
    assert found[~labelled].isnan().all()
    truth, ranking = targets[labelled].numpy(), scores[labelled].numpy()
    by_sample = sklearn_metrics.average_precision_score(truth, ranking, average="samples")
    assert found[labelled].mean().item() == pytest.approx(by_sample)
    # Scikit-learn's ranking average precision agrees on images with a positive, and counts others as 1.
    ranking_score = sklearn_metrics.label_ranking_average_precision_score
    assert ranking_score(truth, ranking) == pytest.approx(by_sample)
    assert ranking_score(targets.numpy(), scores.numpy()) > by_sample
    # The unknown classes of an image are left out of its ranking.
    targets[torch.rand(targets.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = -1
    expected = sklearn_average_precision(scores.T.numpy(), targets.T.numpy())
    np.testing.assert_allclose(image_average_precision(scores, targets), expected, atol=1e-12)


def test_images_are_ranked_within_a_class_and_classes_within_an_image():
    # Every image ranks its own class first, but the second image is less sure of everything.
    scores = torch.tensor([[0.9, 0.8], [0.1, 0.2]])
    found = by_num_labels(scores, torch.tensor([[1, 0], [0, 1]]))["all"]
    assert (found.image_ap, found.mean_ap.present) == (1.0, 0.75)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_average_precision_takes_any_float_and_bool_targets(dtype):
    scores, targets = random_problem(200, 70)
    scores = scores.to(dtype)
    expected = sklearn_average_precision(scores.double().numpy(), targets.numpy())
    np.testing.assert_allclose(average_precision(scores, targets.bool()), expected, atol=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_scores_that_cannot_be_ranked_are_refused(bad):
    scores, targets = random_problem(5, 3)
    scores[3, 1] = bad
    with pytest.raises(ValueError, match="image 3"):
        average_precision(scores, targets)
    with pytest.raises(ValueError, match="expected the same"):
        average_precision(scores[:, :2], targets)


def test_mean_ap_names_both_rules_for_absent_classes():
    both = mean_ap(torch.tensor([0.5, math.nan, 1.0, math.nan]))
    assert (both.present, both.absent_as_zero) == (0.75, 0.375)
    assert (both.num_present, both.num_classes) == (2, 4)
    assert math.isnan(mean_ap(torch.tensor([math.nan])).present)


def sklearn_precision_recall(predicted, targets):
    """Micro over all classes, macro over those with a positive."""
    present = np.flatnonzero(targets.sum(0))
    figures = []
    for options in ({"average": "micro"}, {"average": "macro", "labels": present}):
        precision = sklearn_metrics.precision_score(targets, predicted, zero_division=0, **options)
        recall = sklearn_metrics.recall_score(targets, predicted, zero_division=0, **options)
        figures += [precision, recall, 2 * precision * recall / (precision + recall)]
    return figures


def as_list(found):
    return [
        *(found.overall_precision, found.overall_recall, found.overall_f1),
        *(found.class_precision, found.class_recall, found.class_f1),
    ]


@pytest.mark.parametrize("k", [1, 3, 20])
def test_precision_and_recall_at_k_equal_scikit_learn(k):
    scores, targets = random_problem(300, 20, share=0.05)
    targets[:, 4] = 0
    predicted = (scores.argsort(1, descending=True).argsort(1) < k).numpy()
    found = as_list(precision_recall_at_k(best_classes(scores, 20), targets, k))
    np.testing.assert_allclose(found, sklearn_precision_recall(predicted, targets.numpy()))


@pytest.mark.parametrize("threshold", [0.5, 0.97])
def test_precision_and_recall_at_a_threshold_equal_scikit_learn(threshold):
    scores, targets = random_problem(300, 20, share=0.05)
    predicted = (scores >= threshold).numpy()
    found = as_list(precision_recall_at_threshold(scores, targets, threshold))
    np.testing.assert_allclose(found, sklearn_precision_recall(predicted, targets.numpy()))


def test_the_threshold_by_count_lets_as_many_scores_through_as_there_are_positives():
    scores, targets = random_problem(300, 20, share=0.05)
    threshold = threshold_by_count(scores, targets)
    assert int((scores >= threshold).sum()) == int((targets > 0).sum())
    found = precision_recall_at_threshold(scores, targets, threshold)
    assert found.overall_precision == found.overall_recall == pytest.approx(found.overall_f1)
    # The same decisions from scores that are all higher, where 0.5 lets everything through.
    assert threshold_by_count(10 + scores, targets) == pytest.approx(10 + threshold)


def test_the_threshold_by_count_leaves_unknown_labels_out_and_needs_a_positive():
    scores = torch.tensor([[0.9, 0.8, 0.1], [0.7, 0.6, 0.5]])
    labels = torch.tensor([[-1, 1, 0], [0, -1, 1]], dtype=torch.int8)
    assert threshold_by_count(scores, labels) == pytest.approx(0.7)
    assert math.isnan(threshold_by_count(scores, torch.zeros_like(labels)))


def test_unknown_pairs_are_neither_right_nor_wrong():
    scores = torch.tensor([[0.9, 0.8, 0.1]])
    found = precision_recall_at_threshold(scores, torch.tensor([[1, -1, 0]], dtype=torch.int8))
    assert as_list(found) == [1, 1, 1, 1, 1, 1]
    nothing = precision_recall_at_threshold(scores, torch.tensor([[0, 0, 1]], dtype=torch.int8), 0.95)
    assert as_list(nothing) == [0, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("k", [1, 5])
def test_top_k_accuracy_of_single_labels_equals_scikit_learn(k):
    scores, _ = random_problem(400, 12)
    labels = torch.randint(0, 12, (400,), generator=torch.Generator().manual_seed(1))
    targets = multi_hot([[int(label)] for label in labels], 12)
    expected = sklearn_metrics.top_k_accuracy_score(labels, scores, k=k, labels=range(12))
    assert top_k_accuracy(best_classes(scores, 5), targets, k) == pytest.approx(expected)


def test_images_without_labels_are_not_evaluated():
    targets = torch.tensor([[1, 0, 1], [0, 0, 0], [0, 1, 0]])
    ranked = torch.tensor([[0, 1], [1, 2], [0, 1]])
    assert top_k_accuracy(ranked, targets, 1) == 0.5
    assert top_k_accuracy(ranked, targets, 2) == 1


def test_breakdown_by_number_of_labels_is_the_metric_on_each_subset():
    scores, targets = random_problem(400, 10, share=0.25)
    found = by_num_labels(scores, targets)
    num_labels = targets.sum(1)
    masks = {"1": num_labels == 1, "2": num_labels == 2, "3": num_labels == 3, "4+": num_labels > 3}
    masks["all"] = num_labels > 0
    assert found.keys() == masks.keys()
    for name, mask in masks.items():
        assert found[name].num_images == mask.sum()
        expected = sklearn_average_precision(scores[mask].numpy(), targets[mask].numpy())
        assert found[name].mean_ap.present == pytest.approx(np.nanmean(expected))
        best = scores[mask].argmax(1, keepdim=True)
        assert found[name].top1 == pytest.approx(targets[mask].gather(1, best).float().mean().item())


def test_a_subset_without_images_has_no_figures():
    found = by_num_labels(torch.rand(3, 4), multi_hot([[0], [1], [2]], 4))
    assert found["4+"].num_images == 0
    assert math.isnan(found["4+"].top1)
    assert found["4+"].mean_ap.num_present == 0


def test_score_distribution_counts_the_highest_scores_of_each_image():
    scores, _ = random_problem(1000, 9)
    found = score_distribution(scores, num_bins=20)
    ordered = -np.sort(-scores.numpy(), axis=1)
    for rank in range(4):
        expected, _ = np.histogram(ordered[:, rank], bins=20, range=(0, 1))
        assert found[rank].tolist() == expected.tolist()
    assert score_distribution(torch.tensor([[0.0, 1.0]]), num_bins=2).tolist() == [[0, 1], [1, 0]]


def test_class_table_gives_each_class_its_figures():
    scores = torch.tensor([[0.9, 0.2, 0.1], [0.6, 0.4, 0.2], [0.1, 0.3, 0.3]])
    targets = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 1, 0]])
    cat, dog, owl = per_class(scores, targets, ["cat", "dog", "owl"])
    assert (cat.name, cat.num_positives, cat.precision, cat.recall) == ("cat", 2, 0.5, 0.5)
    assert cat.average_precision == pytest.approx((1 + 2 / 3) / 2)
    assert (dog.recall, dog.average_precision) == (0, 1)
    assert all(
        math.isnan(value) for value in (dog.precision, owl.precision, owl.recall, owl.average_precision)
    )


def test_k_is_estimated_from_fully_labelled_images():
    labels = torch.tensor([[1, 1, 0], [1, -1, -1], [0, 1, 0]], dtype=torch.int8)
    assert estimate_k(labels) == 1.5
    with pytest.raises(ValueError, match="none of 1 images is fully labelled"):
        estimate_k(labels[1:2])


def test_pointing_game_hits_where_the_hottest_cell_lies_in_any_box_of_the_class():
    heatmaps = torch.zeros(4, 4, 4)
    heatmaps[0, 3, 0] = heatmaps[1, 3, 0] = 1  # row 3, column 0: bottom left
    heatmaps[2] = 0.5
    boxes = torch.tensor(
        [
            [0.5, 0.0, 1.0, 0.5],  # top right
            [0.0, 0.5, 0.5, 1.0],  # bottom left
            [0.5, 0.0, 1.0, 0.5],  # of the second heatmap, elsewhere
            [0.0, 0.0, 0.5, 0.5],  # a quarter of the flat one
        ]
    )
    hits = pointing_hits(heatmaps, boxes, torch.tensor([0, 0, 1, 2]))
    assert hits[:3].tolist() == [1, 0, 0.25]
    assert hits[3].isnan()


def test_energy_counts_overlapping_boxes_once():
    heatmaps = torch.ones(1, 4, 4)
    boxes = torch.tensor([[0.0, 0.0, 0.5, 1.0], [0.25, 0.0, 0.75, 1.0]])
    assert energy_in_boxes(heatmaps, boxes, torch.tensor([0, 0])).tolist() == [0.75]
    assert energy_in_boxes(0 * heatmaps, boxes, torch.tensor([0, 0])).isnan().all()


def test_a_box_smaller_than_a_cell_holds_the_cell_under_it():
    heatmaps = torch.zeros(1, 4, 4)
    heatmaps[0, 1, 2] = 1
    between_centres = torch.tensor([[0.51, 0.26, 0.55, 0.30]])
    assert pointing_hits(heatmaps, between_centres, torch.tensor([0])).tolist() == [1]


@pytest.fixture(scope="module")
def real_targets():
    return multi_hot(json.loads((DATA / "real.json").read_text()), 1000)


@pytest.fixture(scope="module")
def predictions():
    """Top-5 classes [50000,5] of each model, best first."""
    with np.load(DATA / "in_val_top5_dev" / "top5.npz") as models:
        return {name: torch.from_numpy(models[name]).long() for name in models.files}


@pytest.fixture(scope="module")
def published():
    return json.loads((DATA / "in_val_top5_dev" / "expected.json").read_text())


@needs_data
def test_real_predictions_give_the_published_accuracies(real_targets, predictions, published):
    labels = np.load(DATA / "in_val_top5_dev" / "val_labels.npy")
    single_targets = multi_hot(labels[:, None].tolist(), 1000)
    assert predictions.keys() == published.keys()
    for name, ranked in predictions.items():
        found = {
            "top1": top_k_accuracy(ranked, single_targets, 1),
            "top5": top_k_accuracy(ranked, single_targets, 5),
            "real_top1": top_k_accuracy(ranked, real_targets, 1),
            "real_top5": top_k_accuracy(ranked, real_targets, 5),
        }
        assert {key: 100 * value for key, value in found.items()} == pytest.approx(published[name], abs=1e-4)
