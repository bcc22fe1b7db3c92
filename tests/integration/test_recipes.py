"""LAMB, groups of parameters, RandAugment, Mixup and CutMix in runs that are killed and resumed."""

import json

import pytest
from safetensors.torch import load_file

from bigscl.training.checkpoint_folder import Checkpoints
from tests.builders import write_config
from tests.integration.runs import (
    assert_same_runs,
    assert_same_weights,
    losses_of,
    memory_of,
    train,
    weights_of,
)

pytestmark = pytest.mark.timeout(360)
MIX = {"mixup": 0.4, "cutmix": 1.0}
RECIPE = {
    "data": {"mix": MIX, "rand_augment": {"magnitude": 20}, "workers": 2},
    "model": {"backbone": "tests.integration.tiny:noisy_net"},
    "optimizer": {
        "name": "lamb",
        "weight_decay": 0.02,
        "decay_norms_and_biases": False,
        "layer_decay": 0.8,
        "clip": 1.0,
        "accumulate": 2,
    },
    "weight_ema": 0.9,
}


def config_of(path, shards, **changes):
    sections = {name: dict(values) for name, values in RECIPE.items() if isinstance(values, dict)}
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    return write_config(path, shards, **sections)


@pytest.mark.parametrize("processes", [1, 2])
def test_a_recipe_that_is_killed_in_mid_epoch_resumes_bit_for_bit(
    tmp_path, trainer_server, shards, processes
):
    options = ("--weight_ema", RECIPE["weight_ema"])
    twin = config_of(tmp_path / "twin.yaml", shards)
    train(twin, *options, processes=processes)
    run = config_of(tmp_path / "run.yaml", shards, checkpoint={"every_steps": 1})
    moment = "bigscl.train:Trainer.train_step before 8"
    trainer_server.run("tests.integration.moments:train", moment, "", run, *options, processes=processes)
    latest = Checkpoints(tmp_path / "run" / "checkpoints", 1).latest()
    assert latest is not None
    assert not latest.progress.ends_epoch
    train(run, *options, processes=processes)
    assert_same_runs(tmp_path / "run", tmp_path / "twin", shards)


def test_without_validation_the_weights_of_the_last_epoch_are_kept_as_the_best(tmp_path, shards):
    config = config_of(tmp_path / "run.yaml", shards)
    done = train(config)
    best = tmp_path / "run" / "best"
    assert_same_weights(load_file(best / "model.safetensors"), weights_of(tmp_path / "run"))
    assert json.loads((best / "metrics.json").read_text())["epoch"] == 3
    assert f"{best}: the weights of the last epoch, 3: without validation nothing says which" in done.stderr
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {line["epoch"] for line in lines} == {1, 2, 3}


def test_images_with_mixup_train_and_leave_no_trace_in_the_memory(tmp_path, shards):
    config = config_of(tmp_path / "run.yaml", shards, data={"mix": {"mixup": 1.0}, "batch_size": 16})
    train(config)
    rows = memory_of(tmp_path / "run", shards)
    # Each batch but the last is even: all of its images have a neighbour.
    assert (rows["sample_visits"] == 0).mean() > 0.9
    assert (rows["last_epoch"] == 2).all()
    assert len(set(losses_of(tmp_path / "run"))) > 3


def test_images_with_cutmix_are_remembered_where_they_show(tmp_path, shards):
    config = config_of(tmp_path / "run.yaml", shards, data={"mix": {"cutmix": 1.0}})
    train(config)
    whole = config_of(tmp_path / "whole.yaml", shards, data={"mix": None})
    train(whole)
    visits = [memory_of(tmp_path / name, shards)["cell_visits"].mean() for name in ("run", "whole")]
    assert 0.4 < visits[0] / visits[1] < 0.9
