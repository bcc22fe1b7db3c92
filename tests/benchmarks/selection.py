"""How long the expected positives of ImageNet take, and in how much memory, beside `np.partition`.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.selection [--samples 1280000] [--classes 1000]

Scores are drawn on the fly, chunk by chunk, the same for both; only the selection is timed. Chunks come in
the order of their ids; with `--order rising` later samples score higher, so that few are ruled out early.
"""

import argparse
import resource
import time

import numpy as np

from bigscl.selection.ranking import select
from bigscl.selection.thresholds import expected_counts
from bigscl.store.transport import SingleProcess

CHUNK = 1000
LIMIT_SECONDS, LIMIT_BYTES = 20, 1e9


class Scores:
    """Chunks of float16 scores like those of a trained network, and the seconds it took to draw them."""

    def __init__(self, num_samples, num_classes, order):
        rng = np.random.default_rng(0)
        self.num_samples, self.order = num_samples, order
        # Few positives, a long tail: a sigmoid of normal logits around -6.
        self.logits = rng.normal(-6, 2, (2 * CHUNK, num_classes)).astype(np.float32)
        self.seconds = 0.0

    def __iter__(self):
        for start in range(0, self.num_samples, CHUNK):
            began = time.perf_counter()
            chunk = self.draw(start)
            self.seconds += time.perf_counter() - began
            yield np.arange(start, start + len(chunk)), chunk

    def draw(self, start):
        """The scores of the chunk that starts at a sample: a window of the logits, shuffled and shifted."""
        rng = np.random.default_rng(start)
        rows = rng.integers(0, len(self.logits), min(CHUNK, self.num_samples - start))
        logits = self.logits[rows] + rng.normal(0, 0.5, (len(rows), 1)).astype(np.float32)
        logits = np.roll(logits, rng.integers(0, logits.shape[1]), axis=1)
        if self.order == "rising":
            logits.sort(axis=0)
            logits += np.float32(12 * start / self.num_samples)
        return (1 / (1 + np.exp(-logits))).astype(np.float16)


def peak_bytes():
    """The most memory this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def time_selection(scores, num_expected):
    """The selection, its seconds without the drawing, and its bytes beyond a drawn chunk."""
    for _ in zip(scores, range(3), strict=False):
        pass
    scores.seconds, before = 0.0, peak_bytes()
    began = time.perf_counter()
    selection = select(scores, num_expected, SingleProcess())
    return selection, time.perf_counter() - began - scores.seconds, peak_bytes() - before


def time_partition(scores, num_expected):
    """The cut value of each class by `np.partition` over all scores in memory, and its seconds."""
    everything = np.concatenate([chunk for _, chunk in scores])
    began = time.perf_counter()
    cuts = np.empty(len(num_expected), np.float16)
    for i, count in enumerate(num_expected):
        # On the bits, which order alike: four times as fast as on float16.
        column = np.ascontiguousarray(everything[:, i]).view(np.uint16)
        cuts[i] = np.partition(column, len(column) - count)[len(column) - count].view(np.float16)
    return cuts, time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--samples", type=int, default=1_280_000)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--positives-per-image", type=float, default=1.2)
    parser.add_argument("--order", choices=["any", "rising"], default="any")
    arguments = parser.parse_args()
    scores = Scores(arguments.samples, arguments.classes, arguments.order)
    counts = np.full(arguments.classes, arguments.samples // arguments.classes)
    num_expected = expected_counts(counts, arguments.positives_per_image)

    selection, seconds, held = time_selection(scores, num_expected)
    cuts, partition_seconds = time_partition(scores, num_expected)
    assert np.array_equal(selection.score, cuts), "np.partition finds other cuts"
    print(
        f"{arguments.samples} x {arguments.classes}, order {arguments.order}, {num_expected.sum()} expected"
    )
    print(f"select        {seconds:6.2f} s, {held / 1e6:.0f} MB beyond the chunk being read")
    ratio = partition_seconds / seconds
    print(f"np.partition  {partition_seconds:6.2f} s, {ratio:.1f} times as long, with all scores in memory")
    within = seconds <= LIMIT_SECONDS and held <= LIMIT_BYTES
    print(f"limits: {LIMIT_SECONDS} s, {LIMIT_BYTES / 1e6:.0f} MB: {'kept' if within else 'BROKEN'}")
    raise SystemExit(not within)


if __name__ == "__main__":
    main()
