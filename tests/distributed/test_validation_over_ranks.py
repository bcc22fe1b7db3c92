"""Validation over real gloo processes gives the bits of one process that has all logits, on every rank."""

import json

import numpy as np
import pytest
import torch

from bigscl.data.build_index import scan
from bigscl.data.epoch_plan import evaluation_plan
from bigscl.data.index import default_path, true_labels
from bigscl.data.loader import BadSamples, Loader
from bigscl.evaluation.inference import predict
from bigscl.evaluation.metrics import average_precision, best_classes, mean_ap, top_k_accuracy
from bigscl.store import SingleProcess
from tests.builders import labelled, write_tar
from tests.distributed.validate_over_ranks import NUM_CLASSES, WORLD_SIZES, config_of, network


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    """The folder of three shards with 71 images, of which one cannot be read."""
    folder, random = tmp_path_factory.mktemp("validation"), np.random.default_rng(0)
    number = 0
    for shard, count in enumerate((40, 5, 26)):
        members = []
        for _ in range(count):
            own = np.flatnonzero(random.random(NUM_CLASSES) < 0.5).tolist()
            members += labelled(f"image{number}", number, full=own)
            number += 1
        if shard == 1:
            members[0] = (members[0][0], b"no image")
        write_tar(folder / f"val-{shard}.tar", members)
    paths = [str(folder / f"val-{shard}.tar") for shard in range(3)]
    scan(paths, num_classes=NUM_CLASSES)[0].save(default_path(paths))
    return folder


@pytest.fixture(scope="module")
def found(shards, trainer_server):
    """What each rank of each world size found, by (rank, world size)."""
    run = trainer_server.run("tests.distributed.validate_over_ranks:main", shards, processes=max(WORLD_SIZES))
    assert run.returncode == 0, run.stderr
    return {
        (rank, size): json.loads((shards / f"found-{rank}-of-{size}.json").read_text())
        for size in WORLD_SIZES
        for rank in range(size)
    }


def expected_metrics(shards):
    """The metrics of all logits at once."""
    index, config = scan(str(shards / "val-*.tar"), num_classes=NUM_CLASSES)[0], config_of(shards)
    torch.set_num_threads(1)  # as on the ranks: sums of a network depend on it
    plan = evaluation_plan(index.shard_sizes, index.rows_per_shard, batch_size=64)
    bad = BadSamples(index, index.num_samples, max_share=1.0)
    loader = Loader(index, plan, 0, config.data.evaluation_transform(), bad=bad)
    settings = {"mean": config.data.mean, "std": config.data.std, "transport": SingleProcess()}
    predicted = predict(network().eval(), loader, "cpu", **settings)
    labels = torch.from_numpy(true_labels(index, predicted.ids)[0])
    metrics = {}
    for logits, end in ((predicted.logits, ""), (predicted.map_logits, "_with_map_pooling")):
        scores = torch.from_numpy(logits)
        metrics["map" + end] = mean_ap(average_precision(scores, labels)).present
        metrics["top1" + end] = top_k_accuracy(best_classes(scores, 1), labels, 1)
    return metrics


def test_metrics_have_the_bits_of_one_process_for_any_number_of_ranks_also_more_than_classes(shards, found):
    threads = torch.get_num_threads()
    expected = expected_metrics(shards)
    torch.set_num_threads(threads)
    assert 0 < expected["map"] < 1
    assert expected["map"] != expected["map_with_map_pooling"]
    for case, told in found.items():
        assert told["metrics"] == [expected, expected], case


def test_every_rank_gets_the_bytes_that_each_rank_has_for_it(found):
    for (rank, size), told in found.items():
        assert told["bytes"] == [[other] * (rank * other) for other in range(size)]
