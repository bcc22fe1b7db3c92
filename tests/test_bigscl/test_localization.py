"""Pointing games over stored heatmaps and network maps equal a slow count, cell by cell."""

import json
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from bigscl.data.build_index import scan
from bigscl.data.epoch_plan import evaluation_plan
from bigscl.data.loader import Loader
from bigscl.data.transforms import EvaluationTransform
from bigscl.evaluation.inference import NETWORK_BATCH, predict
from bigscl.evaluation.localization import map_trials, pointing, read_objects, summarize
from bigscl.memory.heatmaps import to_image
from bigscl.models.spatial import build_model
from bigscl.store import GroupSpec, HeatmapStore, SingleProcess
from tests.builders import jpeg, labelled, write_tar

NUM_CLASSES, SIZE = 4, 6


def boxed_samples(count, random):
    """Samples with one to three classes, one of them given, and one to three large boxes of each."""
    for number in range(count):
        labels = np.sort(random.choice(NUM_CLASSES, random.integers(1, 4), replace=False)).tolist()
        boxes = []
        for label in labels:
            for _ in range(random.integers(1, 4)):
                x, y = random.uniform(0, 0.5, 2)
                boxes.append([label, x, y, x + random.uniform(0.2, 0.5), y + random.uniform(0.2, 0.5)])
        given = [int(random.choice(labels))]
        yield labelled(f"s{number:03d}", number, full=labels, given=given, boxes=boxes), boxes


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """(index, boxes by sample id) of two shards."""
    folder, random = tmp_path_factory.mktemp("boxes"), np.random.default_rng(0)
    samples = list(boxed_samples(23, random))
    for shard, part in enumerate((samples[:14], samples[14:])):
        write_tar(folder / f"b-{shard}.tar", [member for members, _ in part for member in members])
    index = scan(str(folder / "b-*.tar"), num_classes=NUM_CLASSES)[0]
    return index, dict(zip(index.ids().tolist(), [boxes for _, boxes in samples], strict=True))


def make_store(path, index, top=None):
    """A store whose heatmaps are random, with the largest value of some of them in two cells."""
    annotations = index.annotations()
    HeatmapStore.create(path, annotations, heatmap_size=SIZE)
    random = np.random.default_rng(1)
    with HeatmapStore.open(path, annotations=annotations, mode="w") as store:
        for shard in range(2):
            rows = store.load_shard(shard)
            heat = random.random(rows.heatmaps.shape)
            heat[::3, :, 2, 3] = heat[::3, :, 4, 1] = 2
            scores = random.random(rows.scores.shape)
            store.save_shard(
                shard, rows.replace(heatmaps=heat.astype(np.float16), scores=scores.astype(np.float16))
            )
        store.commit(epoch=0)
        if top is not None:
            store.compact(top)
    return HeatmapStore.open(path, annotations=annotations)


def slow_trial(heat, boxes):
    """(hit, energy, chance) by looking at every cell of a heatmap."""
    size = len(heat)
    inside = np.zeros((size, size), bool)
    for _, x0, y0, x1, y1 in boxes:
        for row in range(size):
            for column in range(size):
                x, y = (column + 0.5) / size, (row + 0.5) / size
                # The boxes here are all larger than a cell, so that each holds a centre.
                inside[row, column] |= x0 <= x <= x1 and y0 <= y <= y1
    hottest = heat == heat.max()
    energy = heat[inside].sum() / heat.sum() if heat.sum() else np.nan
    return (hottest & inside).sum() / hottest.sum(), energy, inside.mean()


def slow_figures(index, boxes_of, heat_of):
    """By kind: (pairs, mean hit, mean energy, mean chance)."""
    trials = {"given": [], "missing": [], "all": []}
    for sample_id, boxes in boxes_of.items():
        for label in {box[0] for box in boxes}:
            own = [box for box in boxes if box[0] == label]
            trial = slow_trial(np.asarray(heat_of(sample_id, label), np.float64), own)
            trials["given" if label in index.given[sample_id] else "missing"].append(trial)
            trials["all"].append(trial)
    return {kind: (len(found), *np.nanmean(found, axis=0)) for kind, found in trials.items()}


def as_tuples(found):
    return {kind: (one.num_pairs, one.hit_rate, one.energy, one.chance) for kind, one in found.items()}


def check(found, expected):
    assert found.keys() == expected.keys()
    for kind, figures in as_tuples(found).items():
        assert figures == pytest.approx(expected[kind], rel=1e-5), kind


@pytest.mark.parametrize("top", [None, 2])
def test_stored_heatmaps_point_as_counted_cell_by_cell(shards, tmp_path, top):
    """Classes that are not among the top have no heat."""
    index, boxes_of = shards
    store = make_store(tmp_path / "store", index, top=top)
    ids = index.ids()
    rows = store.read(ids)
    places = {sample_id: place for place, sample_id in enumerate(ids.tolist())}

    def heat_of(sample_id, label):
        kept = range(NUM_CLASSES) if top is None else rows.classes[places[sample_id]].tolist()
        if label not in kept:
            return np.zeros((SIZE, SIZE))
        return rows.heatmaps[places[sample_id], list(kept).index(label)]

    assert rows.heatmaps.shape[1] == (top or NUM_CLASSES)
    expected = slow_figures(index, boxes_of, heat_of)
    assert expected["given"][0] == len(ids)
    assert expected["missing"][0] > 10
    check(pointing(store, index), expected)


def test_boxes_of_classes_that_are_not_labelled_do_not_count(tmp_path):
    members = labelled("a", 0, full=[1], given=[1], boxes=[[1, 0, 0, 1, 1], [2, 0, 0, 1, 1]])
    write_tar(tmp_path / "a.tar", members)
    index = scan(str(tmp_path / "a.tar"), num_classes=NUM_CLASSES)[0]
    HeatmapStore.create(tmp_path / "store", index.annotations(), heatmap_size=SIZE)
    found = pointing(HeatmapStore.open(tmp_path / "store", annotations=index.annotations()), index)
    assert {kind: one.num_pairs for kind, one in found.items()} == {"given": 1, "missing": 0, "all": 1}
    assert np.isnan(found["missing"].hit_rate)


def test_a_store_without_heatmaps_has_nothing_to_point_with(shards, tmp_path):
    index, _ = shards
    HeatmapStore.create(
        tmp_path / "store", index.annotations(), heatmap_size=SIZE, group=GroupSpec(layout="scores")
    )
    store = HeatmapStore.open(tmp_path / "store", annotations=index.annotations())
    with pytest.raises(ValueError, match="holds scores only"):
        pointing(store, index)


def test_shards_without_boxes_are_refused(tmp_path):
    write_tar(tmp_path / "a.tar", [("a.jpg", jpeg(0)), ("a.json", json.dumps({"labels": [1]}).encode())])
    index = scan(str(tmp_path / "a.tar"))[0]
    with pytest.raises(ValueError, match="none of these 1 samples has any"):
        read_objects(index, index.ids())


@pytest.mark.parametrize("resize", ["square", "shorter"])
@pytest.mark.parametrize("batch_size", [4, 23])
def test_network_maps_point_as_counted_cell_by_cell_in_the_image(shards, resize, batch_size):
    index, boxes_of = shards
    transform = EvaluationTransform(size=48, resize=resize, shorter=64)
    torch.manual_seed(2)
    model = build_model("bigscl.models.smallnet:small_resnet", NUM_CLASSES).eval()
    nn.init.normal_(model.network.fc.weight, std=3)
    plan = evaluation_plan(index.shard_sizes, index.rows_per_shard, batch_size=batch_size)

    heat = {}
    for batch in Loader(index, plan, 0, transform):
        images = (batch.images / 255 - 0.5) / 0.25
        padded = torch.cat([images, torch.zeros(NETWORK_BATCH - len(images), 3, 48, 48)])
        with torch.no_grad():
            maps = model.maps(padded)[: len(images)].sigmoid()
        inside, mask = to_image(maps, batch.views, 12)
        heat |= dict(zip(batch.ids.tolist(), (inside * mask[:, None]).numpy(), strict=True))
    found = predict(
        model,
        Loader(index, plan, 0, transform),
        "cpu",
        mean=[0.5] * 3,
        std=[0.25] * 3,
        transport=SingleProcess(),
        measure=partial(map_trials, read_objects(index, index.ids())),
    )
    check(summarize(found.measured, index), slow_figures(index, boxes_of, lambda n, label: heat[n][label]))
