"""The real trainer, with its shards, store, threads and ranks, equals the paper's equations written plainly.

What may differ is the order of sums in float32, about 1e-7, so weights agree to 1e-5. Stored values are
float16: where such a difference meets the edge between two of them, they are neighbours (a step of 5e-4 just
below 1), and the next epochs carry that on. So nearly all stored bits must be equal, and the rest be at most
two steps away. The network has no batch statistics, which belong to each rank's own batch by definition.
"""

import numpy as np
import pytest

from bigscl.config import load_config
from bigscl.selection.thresholds import Thresholds
from bigscl.store.format.quantize import LEVELS, to_bytes
from bigscl.training.checkpoint_folder import Checkpoints
from tests.builders import index_of, make_shards, write_config
from tests.integration.reference import Reference
from tests.integration.reference_plus import ReferencePlus
from tests.integration.runs import (
    assert_same_runs,
    assert_same_weights,
    memory_of,
    store_of,
    train,
    weights_of,
)

MAX_STEPS, MAX_SHARE = 2, 1e-3
WEIGHTS = 1e-5


def assert_same_halves(found, expected):
    """Float16 values in 0 to 1 that differ by rounding only; neighbours there have neighbouring bits."""
    steps = np.abs(found.view(np.int16).astype(int) - expected.view(np.int16))
    assert steps.max() <= MAX_STEPS
    assert (steps > 0).mean() < MAX_SHARE


def spread(values, classes, num_classes):
    """Values [N,k,...] of each image's own classes [N,k], among zeros for the others."""
    whole = np.zeros((len(values), num_classes, *values.shape[2:]), values.dtype)
    whole[np.arange(len(values))[:, None], classes] = values
    return whole


def assert_equals_reference(folder, shards, world_size):
    index, config = index_of(shards), load_config(folder.with_suffix(".yaml"))
    reference = Reference(config, index, world_size).train()
    checkpoints = Checkpoints(folder / "checkpoints", keep=3).all()
    assert len(checkpoints) == len(reference.epochs) == 3
    for epoch, (checkpoint, wanted) in enumerate(zip(checkpoints, reference.epochs, strict=True)):
        store = store_of(folder, shards, checkpoint.progress.snapshot)
        rows = store.read(index.ids())
        assert (rows["last_epoch"] == epoch).all()
        assert_same_halves(rows.scores, wanted["scores"])
        kept = spread(np.ones_like(rows.classes, bool), rows.classes, index.num_classes)
        np.testing.assert_array_equal(kept, wanted["kept"])
        assert_same_halves(spread(rows.heatmaps, rows.classes, index.num_classes), wanted["heatmaps"])
        selection = Thresholds.from_json(store.snapshot.attributes["selection"])
        expected = selection.expected(rows.scores, index.ids())
        np.testing.assert_array_equal(expected, wanted["expected"])
        assert_same_weights(checkpoint.tensors("model.safetensors"), wanted["weights"], WEIGHTS)


def test_run_equals_the_equations(plain, shards):
    assert_equals_reference(plain, shards, world_size=1)


def test_run_on_two_processes_equals_the_equations(tmp_path, shards):
    config = write_config(tmp_path / "run.yaml", shards)
    train(config, processes=2)
    assert_equals_reference(tmp_path / "run", shards, world_size=2)


def test_run_on_four_processes_with_three_shards_equals_the_equations(tmp_path, few_shards):
    config = write_config(tmp_path / "run.yaml", few_shards)
    train(config, processes=4)
    assert_equals_reference(tmp_path / "run", few_shards, world_size=4)


def test_run_on_two_processes_with_rounded_heatmaps_equals_the_equations(tmp_path, shards):
    """Where a difference of float16 meets the chance of a rounding, the two are on neighbouring levels."""
    config = write_config(tmp_path / "run.yaml", shards, store={"codec": "uint8"})
    train(config, processes=2)
    index = index_of(shards)
    reference = Reference(load_config(config), index, 2).train()
    rows = memory_of(tmp_path / "run", shards)
    assert_same_halves(rows.scores, reference.scores)
    assert np.isin(rows.heatmaps, LEVELS).all()
    found = to_bytes(spread(rows.heatmaps, rows.classes, index.num_classes)).astype(int)
    apart = np.abs(found - to_bytes(reference.heatmaps))
    assert apart.max() <= 1
    assert (apart > 0).mean() < MAX_SHARE
    assert_same_weights(weights_of(tmp_path / "run"), reference.epochs[-1]["weights"], WEIGHTS)


@pytest.mark.parametrize(
    "objective",
    [
        {"base": "role"},
        {"base": "ll_cp", "large_loss": {"rate": 0.05}},
        {"base": "em_apl", "em_apl": {"start_epoch": 1}},
        {"base": "crisp"},
    ],
    ids=lambda objective: objective["base"],
)
def test_a_rank_without_samples_changes_not_a_bit(tmp_path, objective):
    """The gradient is halved by averaging over two ranks after it was doubled: both are exact.

    These have the most to exchange: gradients, counts, means or a threshold of the batch, and what they keep.
    """
    shards = make_shards(tmp_path / "shards", 3, 3)
    for name, processes in (("alone", 1), ("beside", 2)):
        train(write_config(tmp_path / f"{name}.yaml", shards, objective=objective), processes=processes)
    assert_same_runs(tmp_path / "alone", tmp_path / "beside", shards)


def test_two_accumulated_batches_equal_one_of_twice_the_size(tmp_path, plain, shards):
    optimizer = {"accumulate": 2, "weight_decay": 1e-4}
    train(write_config(tmp_path / "run.yaml", shards, data={"batch_size": 4}, optimizer=optimizer))
    found, expected = memory_of(tmp_path / "run", shards), memory_of(plain, shards)
    assert_same_weights(weights_of(tmp_path / "run"), weights_of(plain), WEIGHTS)
    assert_same_halves(found.scores, expected.scores)
    np.testing.assert_array_equal(found.classes, expected.classes)
    assert_same_halves(found.heatmaps, expected.heatmaps)


PLUS = {
    "objective": {"base": "enp", "consistency": "scl_corrected"},
    "selection": {"K": 1.7, "by": "spatial", "per_class": True},
}


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_scl_plus_equals_its_equations(tmp_path, shards, processes):
    """Its ranking is a square root of stored values: a rounding error can move it by more than one step."""
    config = write_config(tmp_path / "run.yaml", shards, **PLUS)
    train(config, processes=processes)
    index = index_of(shards)
    reference = ReferencePlus(load_config(config), index, processes).train()
    store = store_of(tmp_path / "run", shards)
    rows = store.read(index.ids())
    assert_same_halves(rows.scores, reference.scores)
    assert_same_halves(spread(rows.heatmaps, rows.classes, index.num_classes), reference.heatmaps)
    np.testing.assert_array_equal(rows["cell_visits"], reference.looks)
    ranked_by = np.array([reference.ranked_by(row) for row in range(len(rows))])
    found = rows.ranked_by().copy()
    found[reference.annotated] = 1
    np.testing.assert_allclose(found, ranked_by, atol=2e-3)
    np.testing.assert_allclose(store.snapshot.attributes["class_ratios"], reference.ratios, rtol=1e-9)
    assert_same_weights(weights_of(tmp_path / "run"), reference.epochs[-1]["weights"], WEIGHTS)
