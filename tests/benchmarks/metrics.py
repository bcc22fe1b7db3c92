"""How long the average precisions of the ReaL validation set take, beside scikit-learn's loop over classes.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.metrics [--images 46837] [--classes 1000] [--device cpu]

Both see the same scores in the same run; the values must agree to 1e-6.
"""

import argparse
import resource
import time

import numpy as np
import torch
from sklearn.metrics import average_precision_score

from bigscl.evaluation.metrics import average_precision

LEAST_RATIO, LIMIT_BYTES, TOLERANCE = 10, 4e9, 1e-6


def draw(num_images, num_classes):
    """Scores that favour the positives, and 1.22 positives per image as in ReaL, every class present."""
    rng = np.random.default_rng(0)
    targets = rng.random((num_images, num_classes), np.float32) < 1.22 / num_classes
    targets[np.arange(num_classes) % num_images, np.arange(num_classes)] = True
    logits = rng.normal(-6, 2, (num_images, num_classes)).astype(np.float32)
    logits[targets] += 5
    return 1 / (1 + np.exp(-logits)), targets


def time_ours(scores, targets, repeats=3):
    """The median seconds of some runs, and the average precisions they gave."""
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        found = average_precision(scores, targets).cpu().numpy()
        seconds.append(time.perf_counter() - began)
    return float(np.median(seconds)), found


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=46_837)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    scores, targets = draw(arguments.images, arguments.classes)
    on_device = [torch.from_numpy(array).to(arguments.device) for array in (scores, targets)]

    seconds, found = time_ours(*on_device)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

    by_class = np.ascontiguousarray(scores.T), np.ascontiguousarray(targets.T)
    began = time.perf_counter()
    expected = [average_precision_score(target, score) for score, target in zip(*by_class, strict=True)]
    loop_seconds = time.perf_counter() - began

    ratio, difference = loop_seconds / seconds, np.abs(found - expected).max()
    print(f"{arguments.images} x {arguments.classes} on {arguments.device}, mAP {found.mean():.6f}")
    print(f"average_precision  {seconds:7.2f} s, {peak / 1e6:.0f} MB at the peak of the process")
    print(f"scikit-learn       {loop_seconds:7.2f} s, {ratio:.1f} times as long, differs by {difference:.1e}")
    kept = ratio >= LEAST_RATIO and peak <= LIMIT_BYTES and difference <= TOLERANCE
    verdict = "kept" if kept else "BROKEN"
    print(f"limits: {LEAST_RATIO} times, {LIMIT_BYTES / 1e6:.0f} MB, {TOLERANCE}: {verdict}")
    raise SystemExit(not kept)


if __name__ == "__main__":
    main()
