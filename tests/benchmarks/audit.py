"""How well wrong and missing labels are found: the audit beside rankings by the network's own predictions.

    python -m tests.benchmarks.label_weights voc12_lite0_scl noisy.csv --share 0.05
    bigscl train voc12_lite0_scl --run runs/noisy --data.labels_file noisy.csv
    python -m tests.benchmarks.audit runs/noisy

The run must have some wrong labels and shards with full labels, which are the truth. Not speed: areas
under ROC curves, of labels that are wrong among all that are named, and of labels that are missing among the
classes that are not. All others rank by predictions of the run's newest weights for its own training images:
self-confidence and normalised margin as cleanlab defines them (by cleanlab if it is installed, `pip install
cleanlab`), of probabilities that are made to sum to 1; and the loss with which AN trains. The network has
learnt these images, for the audit as for the others; cleanlab advises predictions from cross-validation.

On 2,000 scenes of digits (quickstart_en and quickstart_scl, 12 epochs, a pretraining of 12) with 100 wrong
labels, for which the standard error of an area is about 0.025:

    wrong                               EN     SCL    EN, another draw  SCL, another draw
    share of the others in the image    0.808  0.785  0.778             0.768
    audit: mean of the scores           0.795  0.771  0.776             0.762
    last remembered score               0.811  0.784  0.791             0.770
    cleanlab's self-confidence          0.807  0.775  0.794             0.775
    cleanlab's normalised margin        0.751  0.714  0.755             0.733
    loss of the image (AN)              0.787  0.775  0.775             0.775

The share was chosen on the first two columns, among 42 formulas (7 ways to sum up the epochs, 6 to compare
classes); the last two, of other wrong labels and another seed, were looked at once, afterwards. For missing
labels the last score is above the mean in all four, by 0.010 to 0.019.

On Pascal VOC (the command above in bf16, 229 of 4,574 labels wrong, 9 epochs; standard error about 0.006):

    wrong                                     missing (2,298 of 56,049 classes that were kept)
    audit: mean of the scores         0.972   audit: mean of the scores   0.922
    last remembered score             0.971   last remembered score       0.938
    spread of the remembered scores   0.970   logit of the class          0.937
    logit or loss of the label        0.962
    cleanlab's self-confidence        0.960
    loss of the image (AN)            0.950
    cleanlab's normalised margin      0.943
    share of the others in the image  0.939

The share was the audit's formula before: images that show several classes share their heat, so it suspects
their labels. The mean loses 0.002 to 0.014 on digits and gains 0.033 here, so the audit ranks by it now; that
choice was made on this run. It finds wrong labels a little better than self-confidence here and not on
digits; missing ones are found best by the last score, or by the network itself.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from bigscl.config import load_config
from bigscl.data.epoch_plan import evaluation_plan
from bigscl.data.loader import Batch, Loader
from bigscl.evaluation.inference import predict
from bigscl.evaluation.review import ScoreHistory, area_under_curve, score_history, suspicion
from bigscl.evaluation.target import build_network, find_target
from bigscl.memory.score_history import read_score_log
from bigscl.store import SingleProcess
from bigscl.training.run_folder import open_data

try:
    from cleanlab.rank import get_normalized_margin_for_each_label, get_self_confidence_for_each_label

    SOURCE = "cleanlab's"
except ImportError:
    SOURCE = "the same formula as cleanlab's"

    def get_self_confidence_for_each_label(labels, pred_probs):
        """Return the probability of the label."""
        return pred_probs[np.arange(len(labels)), labels]

    def get_normalized_margin_for_each_label(labels, pred_probs):
        """Return how far the label's probability is above the largest other one, in 0 to 1."""
        rest = pred_probs.copy()
        rest[np.arange(len(labels)), labels] = -1
        return (get_self_confidence_for_each_label(labels, pred_probs) - rest.max(1) + 1) / 2


def predictions(run, index, config) -> np.ndarray:
    """Return the logits [N,L] of the newest weights for the training images, in the order of ids."""
    newest = max((run / "checkpoints").glob("step-*"))
    model = build_network(find_target(newest, None, None), index.num_classes)
    plan = evaluation_plan(index.shard_sizes, index.rows_per_shard, batch_size=64, world_size=1, workers=1)
    loader: Iterator[Batch] = iter(Loader(index, plan, 0, config.data.evaluation_transform()))
    found = predict(
        model, loader, "cpu", mean=config.data.mean, std=config.data.std, transport=SingleProcess()
    )
    if not np.array_equal(found.ids, index.ids()):
        raise SystemExit(f"{run}: some of its images cannot be read")
    return found.logits.astype(np.float64)


def wrong_rankings(found: ScoreHistory, values, logits, rows, heat) -> dict[str, np.ndarray]:
    """Return suspicions of the named pairs; `rows` are the images' places in `logits`, `heat` all scores."""
    own = logits[rows, found.classes]
    chances = 1 / (1 + np.exp(-logits[rows]))
    shares = chances / chances.sum(1, keepdims=True)
    inputs = {"labels": found.classes, "pred_probs": shares}
    # The loss of assuming all other classes negative: -log f of the label, -log (1 - f) of the others.
    loss = np.logaddexp(0, logits[rows]).sum(1) - own
    return {
        "audit": values,
        "last remembered score": -found.last,
        "spread of the remembered scores": found.spread,
        "share of the others in the image": -found.mean / np.maximum(heat, 1e-9),
        f"self-confidence ({SOURCE})": -get_self_confidence_for_each_label(**inputs),
        f"normalised margin ({SOURCE})": -get_normalized_margin_for_each_label(**inputs),
        "logit of the label": -own,
        "loss of the label": np.logaddexp(0, -own),
        "loss of the image (AN)": loss,
    }


def missing_rankings(found: ScoreHistory, values, logits, rows, heat) -> dict[str, np.ndarray]:
    """Return suspicions of pairs that are not named."""
    return {
        "audit": values,
        "last remembered score": found.last,
        "logit of the class": logits[rows, found.classes],
    }


def main() -> None:
    """Print the areas under the curves."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run", type=Path)
    run = parser.parse_args().run
    torch.set_num_threads(1)
    config = load_config(run / "config.yaml", ["--run", str(run)])
    data = open_data(config)
    index = data.train
    epochs = read_score_log(run, data.annotations, config.schedule.epochs)
    found = score_history(list(epochs.values()), data.annotations, index.ids())
    values, logits = suspicion(found), predictions(run, index, config)
    rows = np.searchsorted(index.ids(), found.ids)
    heat = np.bincount(rows, found.mean)[rows]
    present = index.labels_of(index.ids(), "full")[rows, found.classes] == 1
    for what, pairs, is_found, rank in (
        ("wrong", found.labelled, ~present, wrong_rankings),
        ("missing", ~found.labelled, present, missing_rankings),
    ):
        truth = is_found[pairs]
        print(f"{what}: {truth.sum():,} of {len(truth):,} labels, {len(epochs)} epochs")
        for name, ranking in rank(found.take(pairs), values[pairs], logits, rows[pairs], heat[pairs]).items():
            print(f"  {area_under_curve(ranking, truth):.3f}  {name}")


if __name__ == "__main__":
    main()
