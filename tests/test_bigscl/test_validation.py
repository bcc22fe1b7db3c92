"""Validation gives the metrics of both poolings, and the setting chooses the one that decides."""

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score

from bigscl.config import ValidationConfig, make_config
from bigscl.data.build_index import scan
from bigscl.data.epoch_plan import evaluation_plan
from bigscl.data.loader import Loader, TooManyBadSamples
from bigscl.distributed.ranks import process_group
from bigscl.evaluation.inference import predict
from bigscl.evaluation.validation import best_metric, validate
from bigscl.memory.memory import show_nothing
from bigscl.models.spatial import build_model
from tests.builders import labelled, write_tar

BACKBONE = "bigscl.models.smallnet:small_resnet"


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
    config = make_config({"run": str(tmp_path), "data": data, "model": {"backbone": BACKBONE}})
    torch.manual_seed(0)
    model = build_model(BACKBONE, 3)
    found = validate(model, index, config, torch.device("cpu"), process_group(), show_nothing)
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


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, 1),
        ({"metric": "top1"}, 2),
        ({"pooling": "map"}, 3),
        ({"pooling": "map", "metric": "top1"}, 4),
    ],
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
    config = make_config({"run": str(tmp_path), "data": data, "model": {"backbone": BACKBONE}})
    model = build_model(BACKBONE, 3)
    if share == 0.5:
        assert validate(model, index, config, torch.device("cpu"), process_group(), show_nothing)["map"] > 0
        return
    with pytest.raises(TooManyBadSamples, match="2 of 5 samples"):
        validate(model, index, config, torch.device("cpu"), process_group(), show_nothing)
