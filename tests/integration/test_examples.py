"""The examples run as users start them, and end in the trainer's numbers where both see the same batches."""

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from bigscl.examples.scene_shards import scene_shards
from bigscl.store import HeatmapStore
from tests.builders import write_config
from tests.forks import trainer_server
from tests.integration.runs import assert_same_rows, assert_same_weights, train, weights_of


def run_example(name: str, *arguments: object, processes: int = 1):
    done = trainer_server().run_module(f"bigscl.examples.{name}", *arguments, processes=processes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done


def trainer_config(path: Path, shards: Path, backbone: str, epochs: int, **sections) -> Path:
    """The settings that the examples have in their code."""
    main = {"epochs": epochs, "learning_rate": 2e-3, "decay": "constant"}
    return write_config(
        path,
        shards,
        data={"workers": 0, "crop": {}, **sections.pop("data", {})},
        model={"backbone": backbone},
        objective={"gamma": {}},
        store={"compact_after": 1, "slots": 3, **sections.pop("store", {})},
        schedule={"warmup": {"epochs": 0, "learning_rate": 1.0}, "main": main},
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("examples")
    scene_shards(place / "shards")
    return place


@pytest.fixture(scope="module")
def own(folder):
    """The folder of an own loop that was not interrupted."""
    place = folder / "own"
    shutil.copytree(folder / "shards", place / "shards")
    run_example("own_loop", place)
    return place


def store_at(folder: Path):
    return HeatmapStore.open(folder / "store", annotations=scene_shards(folder / "shards").annotations())


def rows_of(folder: Path):
    store = store_at(folder)
    return store.read(
        np.concatenate([store.spec.sample_ids(shard) for shard in range(store.spec.num_shards)])
    )


def assert_same_end(example: Path, weights, trained: Path, shards: Path) -> None:
    """The same weights, rows and selection, to the last bit."""
    assert_same_weights(weights, weights_of(trained))
    annotations = scene_shards(shards).annotations()
    store, other = store_at(example), HeatmapStore.open(trained / "store", annotations=annotations)
    assert store.snapshot.attributes == other.snapshot.attributes
    ids = scene_shards(shards).ids()
    assert_same_rows(store.read(ids), other.read(ids))


def own_weights(folder: Path):
    state = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    return {name.removeprefix("network."): weight for name, weight in state.items()}


def test_own_loop_ends_in_the_numbers_of_the_trainer(folder, own):
    config = trainer_config(folder / "run.yaml", own / "shards", "bigscl.models.smallnet:small_resnet", 3)
    train(config)
    assert_same_end(own, own_weights(own), folder / "run", own / "shards")


def test_own_loop_resumes_as_if_it_had_not_ended(folder, own):
    place = folder / "resumed"
    shutil.copytree(folder / "shards", place / "shards")
    run_example("own_loop", place, "--epochs", 1)
    done = run_example("own_loop", place)
    assert "epoch 0" not in done.stdout
    assert_same_weights(own_weights(place), own_weights(own))
    assert_same_rows(rows_of(place), rows_of(own))


def test_own_loop_that_was_killed_before_its_first_checkpoint_starts_again(folder, own):
    place = folder / "killed"
    shutil.copytree(folder / "shards", place / "shards")
    run_example("own_loop", place, "--epochs", 1)
    (place / "checkpoint.pt").unlink()
    # Its state dict was never saved, for all that the store knows.
    done = trainer_server().run_module("bigscl.examples.own_loop", place)
    assert done.returncode == 0, done.stderr
    assert_same_weights(own_weights(place), own_weights(own))
    assert_same_rows(rows_of(place), rows_of(own))


def test_own_loop_on_two_processes_learns_every_sample_once_per_epoch(folder):
    place = folder / "two"
    shutil.copytree(folder / "shards", place / "shards")
    run_example("own_loop", place, processes=2)
    rows = rows_of(place)
    assert (rows["last_epoch"] == 2).all()
    assert rows.classes.shape == (100, 4)
    attributes = store_at(place).snapshot.attributes
    assert attributes["next_epoch"] == 3
    assert 230 <= sum(attributes["selection"]["num_expected"]) <= 270  # 2.5 of 100 labels


def test_webdataset_loop_learns_every_sample_once_per_epoch(folder):
    place = folder / "webdataset"
    shutil.copytree(folder / "shards", place / "shards")
    for _ in range(2):  # it starts from the beginning each time
        run_example("webdataset_loop", place, "--epochs", 2)
        assert (rows_of(place)["last_epoch"] == 1).all()


def test_planned_webdataset_loop_ends_in_the_numbers_of_the_trainer(folder):
    place = folder / "planned"
    shutil.copytree(folder / "shards", place / "shards")
    run_example("webdataset_loop", place, "--planned")
    backbone = "bigscl.models.smallnet:small_resnet"
    config = trainer_config(
        folder / "in-order.yaml", place / "shards", backbone, 3, data={"shuffle_buffer": 1}
    )
    train(config)
    weights = torch.load(place / "weights.pt", weights_only=True)
    assert_same_end(place, weights, folder / "in-order", place / "shards")


def test_timm_loop_ends_in_the_numbers_of_the_trainer(folder):
    place = folder / "timm"
    shutil.copytree(folder / "shards", place / "shards")
    run_example("timm_loop", place)
    store = {"top": None, "compact_after": None}
    train(trainer_config(folder / "timm-run.yaml", place / "shards", "timm:resnet10t", 2, store=store))
    weights = torch.load(place / "weights.pt", weights_only=True)
    assert_same_end(place, weights, folder / "timm-run", place / "shards")


def lightning_weights(folder: Path):
    state = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    return {name.removeprefix("model.network."): weight for name, weight in state.items()}


def test_lightning_loop_ends_in_the_numbers_of_the_own_loop_even_if_resumed(folder, own):
    """Those are the trainer's."""
    pytest.importorskip("lightning")
    place = folder / "lightning"
    shutil.copytree(folder / "shards", place / "shards")
    run_example("lightning_loop", place, "--epochs", 1)
    done = run_example("lightning_loop", place)
    assert "epoch 0" not in done.stdout
    assert_same_weights(lightning_weights(place), own_weights(own))
    assert store_at(place).snapshot.attributes == store_at(own).snapshot.attributes
    assert_same_rows(rows_of(place), rows_of(own))


def test_the_trainer_does_not_start_over_the_store_of_an_own_loop(folder, own):
    before = rows_of(own)
    config = trainer_config(folder / "own.yaml", own / "shards", "bigscl.models.smallnet:small_resnet", 3)
    done = trainer_server().run_module("bigscl.train", config)
    assert done.returncode == 2
    assert "was written by run own-loop-" in done.stderr
    assert_same_rows(rows_of(own), before)
