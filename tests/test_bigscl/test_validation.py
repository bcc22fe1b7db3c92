"""Validation gives the metrics of both poolings, and the setting chooses the one that decides."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from bigscl.config import ValidationConfig
from bigscl.data.build_index import scan
from bigscl.data.epoch_plan import evaluation_plan
from bigscl.data.loader import Loader, TooManyBadSamples
from bigscl.distributed.ranks import process_group
from bigscl.evaluation.inference import predict
from bigscl.evaluation.metrics import average_precision, mean_ap
from bigscl.evaluation.validation import (
    POOLINGS,
    Validation,
    best_metric,
    merge,
    metrics_of_share,
    share_by_class,
)
from bigscl.memory.memory import show_nothing
from bigscl.models.spatial import build_model
from bigscl.store import Ragged
from tests.builders import config_of, labelled, write_tar

BACKBONE = "bigscl.models.smallnet:small_resnet"


def validate(model, index, config):
    return Validation(index, config, torch.device("cpu"), process_group()).run(model, show_nothing)


def test_metrics_of_both_poolings_are_those_of_their_logits(tmp_path):
    random = np.random.default_rng(0)
    full = random.random((40, 3)) < 0.5
    members = [
        part
        for number, row in enumerate(full)
        for part in labelled(f"image{number}", number, full=np.flatnonzero(row).tolist())
    ]
    index = scan([str(write_tar(tmp_path / "val.tar", members))], num_classes=3)[0]
    data = {"train": "t", "val": "v", "size": 48, "resize": "square", "workers": 0, "batch_size": 7}
    config = config_of(data=data, model={"backbone": BACKBONE})
    torch.manual_seed(0)
    model = build_model(BACKBONE, 3)
    found = validate(model, index, config)
    assert model.training

    plan = evaluation_plan(index.shard_sizes, index.rows_per_shard, batch_size=7, world_size=1, workers=0)
    loader = Loader(index, plan, 0, config.data.evaluation_transform())
    settings = {"mean": config.data.mean, "std": config.data.std, "transport": process_group()}
    predicted = predict(model.eval(), loader, "cpu", **settings)
    for logits, end in ((predicted.logits, ""), (predicted.map_logits, "_with_map_pooling")):
        assert found["map" + end] == pytest.approx(average_precision_score(full, logits))
        hits = full[np.arange(40), logits.argmax(1)]
        assert found["top1" + end] == pytest.approx(hits[full.any(1)].mean())
    assert found["map"] != found["map_with_map_pooling"]


def many_images(tmp_path, num_images, num_classes):
    """An index of so many images with random labels, frequent and rare classes, and logits for them."""
    random = np.random.default_rng(num_classes)
    members = labelled("image", 0, full=[0])
    index = scan([str(write_tar(tmp_path / "val.tar", members))], num_classes=num_classes)[0]
    chances = np.geomspace(0.4, 1e-4, num_classes)
    rows = [np.flatnonzero(random.random(num_classes) < chances).tolist() for _ in range(num_images)]
    logits = {name: random.normal(size=(num_images, num_classes)).astype(np.float32) for name in POOLINGS}
    return replace(index, full=Ragged.of(rows)), {"ids": np.arange(num_images), **logits}


@pytest.mark.parametrize(
    ("num_classes", "world_size"), [(11, 1), (11, 2), (11, 3), (11, 16), (60, 7), (1, 2)]
)
def test_divided_metrics_have_the_bits_of_all_logits_at_once(tmp_path, num_classes, world_size):
    index, whole = many_images(tmp_path, 3000, num_classes)
    # Rank 1 has no image, as if there were more ranks than shards.
    owners = np.where(np.arange(3000) % world_size == 1, 0, np.arange(3000) % world_size)
    own = [{name: values[owners == rank] for name, values in whole.items()} for rank in range(world_size)]
    sent = [share_by_class(part if len(part["ids"]) else {}, index, world_size) for part in own]
    shares = [
        metrics_of_share([parts[rank] for parts in sent], index, rank, world_size)
        for rank in range(world_size)
    ]
    labels = torch.from_numpy(index.labels_of(whole["ids"], "full"))
    expected = {}
    for name, end in POOLINGS.items():
        scores = torch.from_numpy(whole[name])
        expected["map" + end] = mean_ap(average_precision(scores, labels)).present
        evaluated = (labels > 0).any(1)
        hits = labels[torch.arange(3000), scores.argmax(1)] > 0
        expected["top1" + end] = float(hits[evaluated].double().mean())
    assert merge(shares) == expected


def test_no_rank_receives_more_than_its_share_of_the_logits(tmp_path):
    index, whole = many_images(tmp_path, 100, 10)
    parts = share_by_class(whole, index, 4)
    assert [part["logits"].shape for part in parts] == [(100, 2), (100, 3), (100, 2), (100, 3)]
    assert np.array_equal(np.concatenate([part["map_logits"] for part in parts], 1), whole["map_logits"])


@pytest.mark.parametrize(
    ("settings", "expected"),
    [({}, 1), ({"metric": "top1"}, 2), ({"pooling": "map"}, 3), ({"pooling": "map", "metric": "top1"}, 4)],
)
def test_the_setting_chooses_the_metric_that_decides(settings, expected):
    metrics = {"map": 1, "top1": 2, "map_with_map_pooling": 3, "top1_with_map_pooling": 4}
    assert best_metric(metrics, ValidationConfig(**settings)) == expected


@pytest.mark.parametrize("share", [0.3, 0.5])
def test_unreadable_images_are_tolerated_as_the_setting_says(tmp_path, share):
    members = [part for n in range(5) for part in labelled(f"image{n}", n, full=[n % 3])]
    members[0], members[2] = ("image0.jpg", b"no image"), ("image1.jpg", b"no image")
    index = scan([str(write_tar(tmp_path / "val.tar", members))], num_classes=3)[0]
    data = {"train": "t", "val": "v", "size": 48, "resize": "square", "workers": 0, "max_bad_share": share}
    config = config_of(data=data, model={"backbone": BACKBONE})
    model = build_model(BACKBONE, 3)
    if share == 0.5:
        assert validate(model, index, config)["map"] > 0
        return
    with pytest.raises(TooManyBadSamples, match="2 of 5 samples"):
        validate(model, index, config)
