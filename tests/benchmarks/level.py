"""How far the level K is off that the memory of a trained run estimates, beside other estimators.

    python -m tests.benchmarks.level RUN [RUN ...]

Shards with full labels say the true K. Each estimator sees the scores of the run's newest snapshot, without
what is left of their start. Printed is K, and in brackets the error in percent of the true K - 1.

- `best bin`: the product's (Garg et al. 2021), see `bigscl.method.level`.
- `Elkan-Noto`: of each class, the sum of all scores over the mean score of its named images (2008).
- `calibrated E-N`: the same with the share of named images at a score (isotonic) in place of the score.
- `median`: twice the images above the median score of the named ones, for each class.
- `DEDPUL`: the largest share of which the posteriors min(share * p / u, 1) have that mean (Ivanov 2019).
"""

import argparse
from pathlib import Path

import numpy as np

from bigscl.config import load_config
from bigscl.method.level import estimate_level
from bigscl.store import SingleProcess, StartValues
from bigscl.training.run import open_data, read_store


def isotonic(values):
    """The nearest values that never fall."""
    means, sizes = [], []
    for value in values:
        means.append(float(value))
        sizes.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mean, size = means.pop(), sizes.pop()
            means[-1] = (means[-1] * sizes[-1] + mean * size) / (sizes[-1] + size)
            sizes[-1] += size
    return np.repeat(means, sizes)


def dedpul(named, shares):
    """How many images have the class, by the share of named ones at each image's score, in rising order."""
    odds = (shares / (1 - shares + 1e-9))[~named]
    odds /= odds.mean() + 1e-12
    alpha, before = 1.0, 2.0
    while before - alpha > 1e-6:
        before, alpha = alpha, float(np.minimum(alpha * odds, 1).mean())
    return named.sum() + alpha * len(odds)


def others(seen, named):
    """K by the other estimators, from what was seen [N,L] and which classes are named [N,L]."""
    totals = {"Elkan-Noto": 0.0, "calibrated E-N": 0.0, "median": 0.0, "DEDPUL": 0.0}
    for c in np.flatnonzero(named.any(0)):
        own, scores = named[:, c], seen[:, c]
        order = np.lexsort((own, scores))
        shares = isotonic(own[order].astype(float))
        totals["Elkan-Noto"] += scores.sum() / scores[own].mean()
        totals["calibrated E-N"] += own.sum() / shares[own[order]].mean()
        totals["median"] += 2 * (scores > np.median(scores[own])).sum()
        totals["DEDPUL"] += dedpul(own[order], shares)
    return {name: total / named.sum() for name, total in totals.items()}


def estimates(run):
    """(True K, K by each estimator) of a run."""
    config = load_config(run / "config.yaml", ["--run", str(run)])
    data = open_data(config)
    store = read_store(config, data.annotations)
    start = StartValues(
        annotations=data.annotations, momentum=config.store.momentum, debiased=store.group.debiased
    )
    found = [
        (ids, scores, start.remaining(visits))
        for ids, scores, visits in store.visits_by_shard(range(store.spec.num_shards))
    ]
    ids, scores, left = (np.concatenate(parts) for parts in zip(*found, strict=True))
    named = np.zeros(scores.shape, bool)
    named[data.annotations.of_rows(ids)] = True
    seen = np.clip((scores - left[:, None] * named) / np.maximum(1 - left[:, None], 1e-9), 0, 1)
    full = data.train.labels_of(ids, "labels") == 1
    level = estimate_level(found, data.annotations, SingleProcess())
    return full.sum() / named.sum(), {"best bin": level, **others(seen[left < 1], named[left < 1])}


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path, nargs="+")
    for run in parser.parse_args().run:
        true, found = estimates(run)
        line = ", ".join(f"{name} {k:.2f} ({(k - 1) / (true - 1) - 1:+.0%})" for name, k in found.items())
        print(f"{run}: K {true:.2f}; {line}", flush=True)


if __name__ == "__main__":
    main()
