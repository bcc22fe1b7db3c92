"""What a rehearsal consists of, and how differences from the reference are judged."""

import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigscl.data.epoch_plan import training_plan
from bigscl.models.spatial import build_model
from bigscl.preflight.device_check import (
    TOLERANCES,
    Difference,
    Outcome,
    compare,
    kept_bits,
    plain_copy,
    precisions_to_check,
    without_randomness,
    worst,
)
from bigscl.preflight.rehearsal import ScratchFolders, epoch_types, first_batches, rehearsal_config
from tests.builders import config_of

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def config(warmup=2, main=3, run="runs/mine", **sections):
    phases = {"warmup": warmup, "main": main}
    return config_of(
        run=run,
        selection={"start_epoch": 2},
        schedule={name: {"epochs": epochs, "learning_rate": 0.1} for name, epochs in phases.items()},
        checkpoint={"every_minutes": 5},
        **sections,
    )


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, [(0, 1, True, False), (2, 4, False, False)]),
        ({"store": {"top": 3}}, [(0, 1, True, False), (2, 4, False, True)]),
        (
            {"store": {"top": 3, "compact_after": 4}},
            [(0, 1, True, False), (2, 3, False, False), (4, 4, False, True)],
        ),
        ({"store": {"top": 3, "compact_after": 9}}, [(0, 1, True, False), (2, 4, False, False)]),
        ({"warmup": 0}, [(0, 2, False, False)]),
        ({"main": 0}, [(0, 1, True, False)]),
    ],
)
def test_epochs_that_cost_the_same_are_one_kind_and_are_rehearsed_once(settings, expected):
    whole = config(**settings)
    kinds = epoch_types(whole)
    found = [(kind.epochs[0], kind.epochs[-1], kind.is_warmup, kind.is_compacted) for kind in kinds]
    assert found == expected
    short = rehearsal_config(whole, Path("short"), None)
    assert short.schedule.epochs == len(kinds)
    for epoch, kind in enumerate(kinds):
        assert short.schedule.is_warmup(epoch) == kind.is_warmup
        compacted = short.compact_after is not None and epoch >= short.compact_after
        assert compacted == kind.is_compacted


def test_rehearsal_has_no_trackers_and_writes_beside_the_run_and_its_store():
    whole = config(store={"url": "s3://bucket/store/"})
    folders = ScratchFolders(whole, "abc")
    assert folders.folder == Path("runs/mine.preflight-abc")
    assert folders.store_place == "s3://bucket/store.preflight-abc"
    short = rehearsal_config(whole, folders.folder, folders.store_place)
    assert short.store_url == "s3://bucket/store.preflight-abc/store"
    assert short.log.trackers == ()
    assert short.checkpoint.every_minutes is None
    plain = ScratchFolders(config(), "abc")
    assert plain.store_place is None
    assert rehearsal_config(config(), plain.folder, None).store_url == "runs/mine.preflight-abc/store"


@settings(max_examples=50, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 9), min_size=1, max_size=8),
    world_size=st.integers(1, 3),
    workers=st.integers(0, 3),
    count=st.integers(1, 6),
)
def test_cut_plan_has_the_first_batches_of_the_whole_one(sizes, world_size, workers, count):
    rows = max(sizes)
    whole = training_plan(
        *(np.array(sizes), rows),
        seed=1,
        epoch=0,
        batch_size=2,
        world_size=world_size,
        workers=workers,
        shuffle_buffer=4,
    )
    cut = first_batches(whole, count, rows)
    for rank in range(world_size):
        batches = [ids.tolist() for ids in cut.batches(rank)]
        full = [ids.tolist() for ids in whole.batches(rank)]
        assert len(batches) <= count
        # A stream that ends early gives its turns to the others, which were cut with it in mind.
        assert all(batch in full for batch in batches)
        if all(len(stream.ids) >= 2 * count for stream in whole.streams[rank]):
            assert batches == full[:count]
        for stream in cut.streams[rank]:
            assert set(stream.shards.tolist()) == set((stream.ids // rows).tolist())


def outcome(**changes):
    values = {
        "logits": torch.ones(3, 4).double(),
        "loss": torch.ones(3).double(),
        "gradient": 2.0,
        "averages": {"heatmaps": torch.full((3, 4, 2, 2), 0.5).double()},
    }
    return Outcome(**{**values, **changes})


def test_difference_is_that_of_the_worst_image():
    heatmaps = torch.full((3, 4, 2, 2), 0.5).double()
    heatmaps[1] += 0.1
    found = dict(compare(outcome(averages={"heatmaps": heatmaps}, gradient=1.0), outcome()))
    assert found == pytest.approx({"logits": 0, "loss": 0, "gradient": 0.5, "heatmaps": 0.1})


def test_nan_is_never_tolerated_and_counts_as_the_worst():
    found = dict(compare(outcome(logits=torch.full((3, 4), math.nan).double()), outcome()))
    bad = Difference(precision="fp32", quantity="logits", found=found["logits"], tolerance=1.0)
    good = Difference(precision="fp32", quantity="logits", found=0.5, tolerance=1.0)
    assert not bad.is_tolerated
    assert good.is_tolerated
    for order in ([good, bad], [bad, good]):
        (one,) = worst(order)
        assert not one.is_tolerated


def test_tolerances_follow_the_bits_that_the_device_keeps(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    assert precisions_to_check("fp32", CPU) == ["fp32"]
    assert precisions_to_check("bf16", CPU) == ["bf16", "fp32"]
    assert precisions_to_check("bf16", CUDA) == ["bf16", "fp32", "fp16"]
    assert kept_bits("fp32", CPU) == 24
    assert [kept_bits("bf16", device) for device in (CPU, CUDA)] == [8, 8]
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    assert kept_bits("fp32", CUDA) == 11
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    assert kept_bits("fp32", CUDA) == 24
    for quantity in TOLERANCES[24]:
        assert TOLERANCES[24][quantity] <= TOLERANCES[11][quantity] <= TOLERANCES[8][quantity]


def test_without_randomness_a_network_with_dropout_repeats_itself_and_is_then_as_before():
    model = build_model("tests.integration.tiny:noisy_net", 3).train()
    images = torch.rand(4, 3, 48, 48)
    modes = [module.training for module in model.modules()]
    with without_randomness(model):
        first, second = (model(images, maps=True).logits for _ in range(2))
        torch.testing.assert_close(first, second, rtol=0, atol=0)
        # Batch statistics stay those of the batch: another image changes them for all.
        other = model(torch.cat([images[:3], 1 - images[3:]]), maps=True).logits
        assert not torch.equal(first[0], other[0])
    assert [module.training for module in model.modules()] == modes
    assert not torch.equal(*(model(images, maps=True).logits for _ in range(2)))


def test_copy_computes_by_itself():
    """A copy whose hooks were still those of the original would return the original's maps."""
    model = build_model("tests.integration.tiny:tiny_net", 3).train()
    model.forward = SimpleNamespace()  # as Accelerate wraps it
    copied = plain_copy(model)
    del model.forward
    images = torch.rand(2, 3, 48, 48)
    before = model(images, maps=True).logits
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert copied(images, maps=True).logits.abs().max() == 0
    torch.testing.assert_close(model(images, maps=True).logits, before)
