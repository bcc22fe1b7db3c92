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

from bigscl.evaluation.predictions import load_predictions

GRID = np.linspace(0.01, 0.99, 99)


def f1(decided, truth):
    """F1 over all images and classes, from booleans [N,L]."""
    return 2 * (decided & truth).sum() / max(1, decided.sum() + truth.sum())


def best_threshold(scores, truth):
    """The threshold of the grid with the highest F1."""
    return max(GRID, key=lambda threshold: f1(scores >= threshold, truth))


def two_fold(scores, truth):
    """F1 of decisions by thresholds that the other half of the images chose."""
    even = np.arange(len(scores)) % 2 == 0
    decided = np.zeros_like(truth)
    for half in (even, ~even):
        decided[half] = scores[half] >= best_threshold(scores[~half], truth[~half])
    return f1(decided, truth)


def by_count(scores, truth):
    """F1 if as many classes are predicted as there are positives."""
    cut = np.sort(scores, axis=None)[-truth.sum()]
    return f1(scores >= cut, truth)


def measured(evaluation):
    """What is printed of an evaluation."""
    saved = load_predictions(evaluation)
    truth = saved.labels == 1
    # No decision on labels that nobody knows.
    scores = np.where(saved.labels == -1, 0, 1 / (1 + np.exp(-saved.logits.astype(np.float64))))
    decided = scores >= 0.5
    hits, highest = (decided & truth).sum(), best_threshold(scores, truth)
    return (
        f"0.5: {f1(decided, truth):.2%} ({hits / max(1, decided.sum()):.1%}, {hits / truth.sum():.1%}), "
        f"two-fold: {two_fold(scores, truth):.2%}, count: {by_count(scores, truth):.2%}, "
        f"highest: {f1(scores >= highest, truth):.2%} at {highest:.2f}"
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
