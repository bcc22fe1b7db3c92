"""The estimate of how many mined labels are right, beside the truth, for each epoch of finished runs.

    bigscl study runs/trust configs/voc12_lite0_en.yaml --set data.canaries=0.05 --no-boxes
    python -m tests.benchmarks.trust runs/trust/*/seed-* --picture trust.png

Not speed. Runs need `data.canaries` and shards with full labels, which are the truth. What was mined in an
epoch is selected again from the scores that the run has kept of it, K labels for each given one; the estimate
and its interval are those that the run has logged. Runs of one config share a panel of the picture.
"""

import argparse
import json
from pathlib import Path

import numpy as np

from bigscl.config import load_config
from bigscl.memory.score_history import read_score_log
from bigscl.training.run_folder import open_data


def true_precision(pairs, annotations, ids, num_expected, full):
    """Return the share of the mined labels that are right, from the kept pairs [N,k] of an epoch."""
    rows = np.repeat(np.arange(len(ids)), pairs.shape[1])
    classes, scores = pairs["class"].ravel().astype(int), pairs["score"].ravel()
    # By class, then from the highest score to the lowest; of equal ones the first id is taken.
    order = np.lexsort((rows, -scores.astype(float), classes))
    starts = np.searchsorted(classes[order], np.arange(len(num_expected)))
    rank = np.arange(len(order)) - starts[classes[order]]
    chosen = order[rank < num_expected[classes[order]]]
    chosen = chosen[~annotations.is_given(ids[rows[chosen]], classes[chosen])]
    # Images whose only label is hidden are not counted: they have nothing given, so more is to be found.
    chosen = chosen[np.isin(ids[rows[chosen]], np.flatnonzero(annotations.given.lengths))]
    return full[rows[chosen], classes[chosen]].mean()


def epochs_of(run):
    """Yield (epoch, truth, estimate, low, high) of a run, in percent."""
    config = load_config(run / "config.yaml", ["--run", str(run)])
    data = open_data(config)
    ids = data.train.ids()
    full = data.train.labels_of(ids, "full") == 1
    hidden = data.train.hidden
    labels = np.bincount(
        np.concatenate([data.annotations.given.values, hidden.values]).astype(int), minlength=full.shape[1]
    )
    num_expected = np.rint(data.positives_per_image * labels).astype(int)
    logged = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    estimates = {line["epoch"]: line for line in logged if line["kind"] == "epoch"}
    for epoch, pairs in read_score_log(run, data.annotations, config.schedule.epochs).items():
        truth = true_precision(pairs, data.annotations, ids, num_expected, full)
        line = estimates[epoch + 1]
        values = (truth, line["mined_precision"], *line["mined_precision_95"])
        yield epoch + 1, *(100 * value for value in values)


def draw(runs, path):
    """Draw a panel for each config: truth as lines, estimates as points with their intervals."""
    from matplotlib.figure import Figure

    configs = sorted({run.parent for run in runs})
    figure = Figure(figsize=(5.2 * len(configs), 4), layout="constrained")
    for config, axes in zip(configs, np.atleast_1d(figure.subplots(1, len(configs))), strict=True):
        for number, run in enumerate(run for run in runs if run.parent == config):
            epochs, truth, estimate, low, high = np.array(runs[run]).T
            color = f"C{number}"
            axes.plot(epochs, truth, color=color, label=f"{run.name}: truth")
            spread = [np.maximum(estimate - low, 0), np.maximum(high - estimate, 0)]
            axes.errorbar(
                epochs + 0.08 * number, estimate, spread, fmt="o", color=color, label=f"{run.name}: estimate"
            )
        axes.set(title=config.name, xlabel="epoch", ylabel="mined labels that are right, %", ylim=(0, 80))
        axes.legend(fontsize=8, ncols=2, loc="lower right")
        axes.grid(alpha=0.3)
    figure.savefig(path, dpi=80)


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--picture", type=Path, help="PNG to write")
    options = parser.parse_args()
    runs = {run: list(epochs_of(run)) for run in options.runs}
    for run, epochs in runs.items():
        print(f"{run}: epoch, truth, estimate (interval)")
        for epoch, truth, estimate, low, high in epochs:
            print(f"  {epoch:3} {truth:5.1f} {estimate:5.1f} ({low:.1f} to {high:.1f})")
    if options.picture:
        draw(runs, options.picture)


if __name__ == "__main__":
    main()
