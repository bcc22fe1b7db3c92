"""F1 of evaluated runs at 0.5, and at thresholds that suit their scores.

    python -m tests.benchmarks.thresholds EVALUATION [EVALUATION ...]

Each is a folder with `predictions.zarr` of images with full labels. A network that ranks well may have all
its scores too high or too low. Printed are, in percent:

- `0.5`: the report's F1, precision and recall.
- `two-fold`: one threshold for all classes, the best one for every other image, applied to the rest, and the
  other way round.
- `count`: one threshold that lets as many classes through as the images have in all. Only K must be known.
- `highest`: the best of one threshold for all classes, chosen on these images, and that threshold.
"""

import argparse
from pathlib import Path

import numpy as np
import torch

from bigscl.evaluation.metrics import precision_recall_at_threshold, threshold_by_count
from bigscl.evaluation.predictions import load_predictions

GRID = np.linspace(0.01, 0.99, 99)


def f1(scores, targets, threshold):
    """F1 over all images and classes."""
    return precision_recall_at_threshold(scores, targets, float(threshold)).overall_f1


def best_threshold(scores, targets):
    """The threshold of the grid with the highest F1."""
    return max(GRID, key=lambda threshold: f1(scores, targets, threshold))


def two_fold(scores, targets):
    """F1 of decisions by thresholds that the other half of the images chose."""
    reached = torch.empty_like(scores)
    for half, other in ((0, 1), (1, 0)):
        reached[half::2] = scores[half::2] - best_threshold(scores[other::2], targets[other::2])
    return f1(reached, targets, 0)


def measured(evaluation):
    """What is printed of an evaluation."""
    saved = load_predictions(evaluation)
    scores, targets = torch.from_numpy(saved.logits).double().sigmoid(), torch.from_numpy(saved.labels)
    found = precision_recall_at_threshold(scores, targets)
    count, highest = threshold_by_count(scores, targets), best_threshold(scores, targets)
    return (
        f"0.5: {found.overall_f1:.2%} ({found.overall_precision:.1%}, {found.overall_recall:.1%}), "
        f"two-fold: {two_fold(scores, targets):.2%}, count: {f1(scores, targets, count):.2%}, "
        f"highest: {f1(scores, targets, highest):.2%} at {highest:.2f}"
    )


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("evaluation", type=Path, nargs="+")
    for evaluation in parser.parse_args().evaluation:
        print(f"{evaluation}: {measured(evaluation)}", flush=True)


if __name__ == "__main__":
    main()
