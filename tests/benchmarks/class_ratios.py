"""How close K of each class comes to the truth on real label statistics, beside one K for all classes.

    python -m tests.benchmarks.class_ratios [--seeds 3] [--data ../shared/data]
    python -m tests.benchmarks.class_ratios --shards 'shards/voc12/train-*.tar' 'shards/voc12/val-*.tar'

The labels are real (VOC-2012 train, COCO-2014 train): one is drawn uniformly for each image. The memory is
simulated: its scores separate present from absent classes as far as `--separation` says, from nothing (0)
to nearly everything (6). Thresholds and estimates are the product's, repeated over `--epochs`; K is the
true one. Real memories also raise what is named and see best what is large and alone. Printed are,
each class weighted by its labels, the mean error of K_c in percent of the true K_c, and precision and recall
of the unnamed positives that are selected.

With `--shards`, of training and validation images with full labels and boxes, labels are drawn uniformly, by
size and by position; printed are the errors of one K, of K per class for each separation, and of K of each
class from how many of the validation images (all, or 200) show it. The level is the true one.
"""

import argparse
from pathlib import Path

import numpy as np

from bigscl.data.index import load_index
from bigscl.data.labels.training_labels import draw_given
from bigscl.selection.ranking import class_ratios, given_first, select
from bigscl.selection.thresholds import expected_counts
from bigscl.store import Annotations, SingleProcess
from tests.benchmarks.label_weights import draw_weighted

CHUNK = 1000


def load_labels(data: Path) -> dict[str, np.ndarray]:
    """Full labels, bool [n,L], of each dataset that is there."""
    found = {}
    if (voc := data / "voc2012_labels" / "voc2012_spml.npz").exists():
        found["VOC-2012"] = np.load(voc)["train_labels"].astype(bool)
    if (coco := data / "coco2014_labels" / "coco2014_labels.npz").exists():
        found["COCO-2014"] = np.unpackbits(np.load(coco)["train"], axis=1)[:, :80].astype(bool)
    return {name: labels[labels.any(1)] for name, labels in found.items()}


def draw_single(labels, seed):
    """One positive of each image, drawn uniformly."""
    values = np.random.default_rng(seed).random(labels.shape)
    return np.where(labels, values, -1).argmax(1)


def simulated_scores(labels, separation, seed):
    logits = np.random.default_rng(1000 + seed).normal(-3, 1.5, labels.shape) + separation * labels
    return (1 / (1 + np.exp(-logits))).astype(np.float16)


def select_over_epochs(labels, given, scores, k, *, per_class, epochs):
    """(K of each class, expected positives [n,L]) after some selections."""
    num_samples, num_classes = labels.shape
    annotations = Annotations.of(given[:, None].tolist(), num_classes, rows_per_shard=CHUNK)
    counts, ids = annotations.counts(), np.arange(num_samples)
    ratios = np.full(num_classes, k)
    for _ in range(epochs):
        chunks = ((part, scores[part]) for part in np.array_split(ids, -(-num_samples // CHUNK)))
        cuts = select(
            given_first(chunks, annotations),
            expected_counts(counts, ratios),
            SingleProcess(),
            annotations=annotations,
        )
        used = ratios
        if per_class:
            ratios = class_ratios(k, counts, cuts.positives)
    values = scores.copy()
    values[ids, given] = 1
    expected = (values > cuts.score) | ((values == cuts.score) & (ids[:, None] <= cuts.tie_id))
    return used, expected


def measure(labels, seed, separation, *, per_class, epochs):
    """(error of K_c, precision, recall) of one draw."""
    given = draw_single(labels, seed)
    scores = simulated_scores(labels, separation, seed)
    counts = np.bincount(given, minlength=labels.shape[1])
    k = labels.sum() / len(labels)
    ratios, expected = select_over_epochs(labels, given, scores, k, per_class=per_class, epochs=epochs)
    truth = labels.sum(0) / np.maximum(counts, 1)
    error = np.average(np.abs(ratios - truth) / truth, weights=counts)
    unnamed = np.ones(labels.shape, bool)
    unnamed[np.arange(len(labels)), given] = False
    right = (expected & labels & unnamed).sum()
    return error, right / max(1, (expected & unnamed).sum()), right / (labels & unnamed).sum()


def print_draws(train, val, options):
    """The errors of K_c by how labels are drawn."""
    ids = train.ids()
    full, known = (index.labels_of(index.ids(), "full") == 1 for index in (train, val))
    k = full.sum() / len(full)
    print("drawn by  one K, per class by separation, from all validation images, from 200 of them")
    for by in ("uniform", "size", "position"):
        errors = []
        for seed in range(options.seeds):
            drawn = draw_given(train, seed) if by == "uniform" else draw_weighted(train, seed, by)
            given = (drawn.labels_of(ids, "given") == 1).argmax(1)
            counts = np.bincount(given, minlength=full.shape[1])
            few = known[np.random.default_rng(seed).choice(len(known), 200, replace=False)]
            found = [np.full(len(counts), k)]
            for separation in options.separation:
                scores = simulated_scores(full, separation, seed)
                kinds = {"per_class": True, "epochs": options.epochs}
                found.append(select_over_epochs(full, given, scores, k, **kinds)[0])
            found += [
                np.maximum(1, some.mean(0) * len(full) / np.maximum(counts, 1)) for some in (known, few)
            ]
            truth = full.sum(0) / np.maximum(counts, 1)
            errors.append([np.average(np.abs(each - truth) / truth, weights=counts) for each in found])
        print(f"{by:<8}  {', '.join(f'{error:.1%}' for error in np.mean(errors, 0))}")


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--separation", type=float, nargs="+", default=[2.0, 3.0, 4.0, 6.0])
    parser.add_argument("--shards", nargs=2, metavar=("TRAIN", "VAL"))
    options = parser.parse_args()
    if options.shards:
        print_draws(*(load_index(shards, None) for shards in options.shards), options)
        return
    datasets = load_labels(options.data)
    if not datasets:
        raise SystemExit(f"{options.data}: no labels found. Give their folder with --data.")
    print("data        K     separation  K of classes  error of K_c  precision  recall")
    for name, labels in datasets.items():
        for separation in options.separation:
            for per_class in (False, True):
                kinds = {"per_class": per_class, "epochs": options.epochs}
                error, precision, recall = np.mean(
                    [measure(labels, seed, separation, **kinds) for seed in range(options.seeds)], axis=0
                )
                kind = "per class" if per_class else "one"
                print(
                    f"{name:<11} {labels.sum() / len(labels):4.2f}  {separation:>10}  "
                    f"{kind:<12}  {error:>12.1%}  {precision:>9.1%}  {recall:>6.1%}"
                )


if __name__ == "__main__":
    main()
