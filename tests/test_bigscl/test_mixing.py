"""Mixup and CutMix against slow references: pixels, labels, consistency, and the memory."""

# Shapes: B batch, L classes, S side of the images, G side of the score map, W side of the heatmap.

import itertools

import numpy as np
import pytest
import torch

from bigscl.config import ConfigError, StoreConfig
from bigscl.data.augmentation import Mixing, MixRow, beta, pasted_boxes
from bigscl.losses.objective import BASES, Objective
from bigscl.losses.registry import LossInputs
from bigscl.memory.lookup import CheckedViews, GivenClasses, MemoryBatch, to_device, updated_averages
from bigscl.selection.thresholds import Thresholds
from bigscl.store import Rows
from bigscl.training.step import Mix, mix_batches
from tests.builders import config_of, make_batch
from tests.test_bigscl.test_views import largest_gap
from tests.test_store.conftest import make_annotations

COUNT, SIZE, G = 4000, 48, 6
IDS = [7, 3, 11, 5, 2]
CPU = torch.device("cpu")
GENERATOR = torch.Generator().manual_seed(0)
# Unmixed, Mixup, CutMix of a corner and of all but a strip that no cell's centre is in, and no neighbour.
ROWS = torch.tensor(
    [
        MixRow(),
        MixRow(share=0.3),
        MixRow(share=0.75, left=0.5, top=0.0, width=0.5, height=0.5),
        MixRow(share=1 / 24, left=0.0, top=0.0, width=1.0, height=23 / 24),
        MixRow(),
    ]
)
NEIGHBOURS = [1, 0, 3, 2, 4]
MIX = Mix(rows=ROWS)


def rows_of(mixing, ids, *, size=SIZE, seed=1, epoch=2):
    return mixing.rows(ids, size=size, seed=seed, epoch=epoch)


@pytest.mark.parametrize("alpha", [1e-4, 0.1, 0.4, 1.0])
def test_shares_have_the_beta_distribution(alpha):
    uniform = np.random.default_rng(1).random((COUNT, 32))
    reference = np.random.default_rng(2).beta(alpha, alpha, COUNT)
    # Two samples of one distribution differ by more than this once in 10,000 times.
    assert largest_gap(beta(alpha, uniform).round(6), reference.round(6)) < 2.23 * np.sqrt(2 / COUNT)


def test_boxes_are_those_of_the_papers_code():
    random = np.random.default_rng(3)
    kept, centres = random.random(500), random.random((500, 2))
    for share, (x, y), box in zip(kept, centres, pasted_boxes(kept, centres, SIZE), strict=True):
        side, cx, cy = int(SIZE * np.sqrt(1 - share)), int(x * SIZE), int(y * SIZE)
        x1, x2 = max(cx - side // 2, 0), min(cx + side // 2, SIZE)
        y1, y2 = max(cy - side // 2, 0), min(cy + side // 2, SIZE)
        assert box.tolist() == [x1, y1, x2 - x1, y2 - y1]


def test_a_mix_depends_on_seed_epoch_and_ids_alone():
    mixing = Mixing(mixup=0.4, cutmix=1.0)
    assert np.array_equal(rows_of(mixing, IDS), rows_of(mixing, IDS))
    others = [rows_of(mixing, IDS, seed=2), rows_of(mixing, IDS, epoch=3), rows_of(mixing, [8, *IDS[1:]])]
    assert not any(np.array_equal(rows_of(mixing, IDS), other) for other in others)


def test_so_many_images_are_mixed_and_so_many_of_them_cut():
    rows = rows_of(Mixing(mixup=1.0, cutmix=1.0, probability=0.6, cutmix_share=0.25), list(range(COUNT)))
    cut, mixed = rows[:, 3:].any(1), rows[:, 0] < 1
    assert abs(mixed.mean() - 0.6) < 0.03
    assert abs(cut.mean() - 0.15) < 0.03
    only = rows_of(Mixing(cutmix=1.0), list(range(COUNT)))
    assert only[:, 3:].any(1).mean() > 0.95
    assert not rows_of(Mixing(mixup=1.0), list(range(COUNT)))[:, 1:].any()


def test_the_share_of_an_image_with_a_box_is_the_area_outside_it():
    rows = rows_of(Mixing(cutmix=1.0), list(range(200)))
    kept = [
        np.mean([not (left <= x < left + w and top <= y < top + h) for x, y in grid(SIZE)])
        for _, left, top, w, h in rows
    ]
    assert rows[:, 0] == pytest.approx(kept, abs=1e-6)


def grid(side):
    return itertools.product((np.arange(side) + 0.5) / side, repeat=2)


def test_an_image_without_a_neighbour_is_not_mixed():
    mixing = Mixing(cutmix=1.0)
    assert tuple(rows_of(mixing, IDS)[-1]) == MixRow()
    assert [tuple(row) for row in rows_of(mixing, [3])] == [MixRow()]
    assert rows_of(mixing, []).shape == (0, 5)


def shows(row, y, x, side):
    """Whether a cell or pixel shows the image (1), its neighbour (0), or how much of it (Mixup)."""
    share, left, top, width, height = row.tolist()
    if share < 1 and not width:
        return share
    x, y = (x + 0.5) / side, (y + 0.5) / side
    return 0.0 if left <= x < left + width and top <= y < top + height else 1.0


def test_pixels_are_those_of_the_image_of_its_neighbour_or_of_both():
    images = torch.rand(5, 3, SIZE, SIZE, generator=GENERATOR)
    found = MIX.pixels(images)
    expected = torch.empty_like(images)
    for n, y, x in itertools.product(range(5), range(SIZE), range(SIZE)):
        own = shows(ROWS[n], y, x, SIZE)
        expected[n, :, y, x] = own * images[n, :, y, x] + (1 - own) * images[NEIGHBOURS[n], :, y, x]
    torch.testing.assert_close(found, expected)
    for n in (0, 2, 3, 4):  # pasted, not blended: the very same bits
        assert set(found[n].flatten().tolist()) <= set(images.flatten().tolist())


def labels_and_logits(num_classes=4):
    labels = torch.randint(-1, 2, (5, num_classes), generator=GENERATOR, dtype=torch.int8)
    return labels, torch.randn(5, num_classes, generator=GENERATOR)


def of_mixed(inputs, visible_logits=None, **objective):
    logits = inputs.logits if visible_logits is None else visible_logits
    return Objective(**objective).of_mixed(inputs, MIX.inputs(inputs, logits, G), gamma=2.0)


def test_the_loss_of_assumed_negatives_is_that_of_soft_targets():
    labels, logits = labels_and_logits()
    share = ROWS[:, :1]
    targets = share * (labels == 1) + (1 - share) * (labels == 1)[NEIGHBOURS]
    reference = torch.nn.functional.binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(
        1
    )
    found = of_mixed(LossInputs(logits=logits, labels=labels), base="an", consistency="none")
    torch.testing.assert_close(found.total, reference)


@pytest.mark.parametrize("base", sorted(name for name, term in BASES.items() if term.mixes))
def test_the_loss_is_that_of_both_images_by_their_shares(base):
    labels, logits = labels_and_logits()
    expected = torch.rand(5, 4, generator=GENERATOR) < 0.5
    inputs = LossInputs(
        logits=logits, labels=labels, expected=expected, pseudo_positives=expected & (logits > 0)
    )
    found = of_mixed(inputs, base=base, consistency="none").base
    for n, other in enumerate(NEIGHBOURS):
        losses = []
        for place in (n, other):
            rows = {
                name: getattr(inputs, name)[[place]] for name in ("labels", "expected", "pseudo_positives")
            }
            single = LossInputs(logits=logits[[n]], **rows)
            losses.append(Objective(base=base, consistency="none")(single).base[0])
        share = ROWS[n, 0]
        torch.testing.assert_close(found[n], share * losses[0] + (1 - share) * losses[1])


@pytest.mark.parametrize("kept", [None, 2], ids=["all classes", "top 2"])
def test_consistency_sees_the_cells_that_show_the_image_alone(kept):
    labels, logits = labels_and_logits()
    maps = torch.rand(5, 4, G, G, generator=GENERATOR).requires_grad_()
    target = torch.rand(5, kept or 4, G, G, generator=GENERATOR)
    classes = None if kept is None else torch.tensor([[0, 2]] * 5)
    inputs = LossInputs(logits=logits, labels=labels, maps=maps, target=target, classes=classes)
    found = of_mixed(inputs, base="an", consistency="scl").consistency
    dense = target if classes is None else torch.zeros(5, 4, G, G).index_copy(1, classes[0], target)
    for n in range(5):
        cells = [(y, x) for y, x in itertools.product(range(G), repeat=2) if shows(ROWS[n], y, x, G) == 1]
        squares = [((maps - dense)[n, :, y, x] ** 2).sum() for y, x in cells]
        expected = sum(squares, torch.tensor(0.0)) / (4 * G * G)
        torch.testing.assert_close(found[n], expected)
        assert (found[n] == 0) == (n in (1, 3))
    found.sum().backward()
    assert not maps.grad[1].any()
    assert not maps.grad[2, :, : G // 2, G // 2 :].any()


@pytest.mark.parametrize("norm", ["rms", "l2"])
def test_gradients_of_hidden_cells_are_finite_under_every_norm(norm):
    labels, logits = labels_and_logits()
    maps = torch.rand(5, 4, G, G, generator=GENERATOR).requires_grad_()
    inputs = LossInputs(logits=logits, labels=labels, maps=maps, target=torch.rand(5, 4, G, G))
    of_mixed(inputs, base="an", consistency="scl", norm=norm).total.sum().backward()
    assert maps.grad.isfinite().all()


def test_the_score_is_pooled_over_the_cells_that_show_the_image_alone():
    logit_map = torch.randn(5, 4, G, G, generator=GENERATOR)
    logits = logit_map.mean((2, 3))
    found = MIX.visible_logits(logits, logit_map)
    assert torch.equal(found[[0, 1, 3, 4]], logits[[0, 1, 3, 4]])
    cells = [(y, x) for y, x in itertools.product(range(G), repeat=2) if shows(ROWS[2], y, x, G)]
    torch.testing.assert_close(found[2], torch.stack([logit_map[2, :, y, x] for y, x in cells]).mean(0))
    labels, _ = labels_and_logits()
    inputs = LossInputs(logits=logits, labels=labels, scores=torch.rand(5, 4, generator=GENERATOR))
    agreement = of_mixed(inputs, found, base="an", consistency="cl").consistency
    expected = (found.sigmoid() - inputs.scores).square().mean(1)
    torch.testing.assert_close(agreement[[0, 2, 4]], expected[[0, 2, 4]])
    assert not agreement[[1, 3]].any()


# The memory


def stored_batch(erased, ema) -> MemoryBatch:
    random = np.random.default_rng(4)
    rows = Rows(
        scores=random.random((5, 4)).astype(np.float16),
        sample_visits=np.arange(5, dtype=np.uint8),
        heatmaps=random.random((5, 4, 2 * G, 2 * G)).astype(np.float16),
        cell_visits=random.integers(0, 9, (5, 2 * G, 2 * G)).astype(np.uint8),
        spatial_score=random.random((5, 4)).astype(np.float16),
    )
    views = torch.tensor([[0.0, 0.0, 1.0, 1.0, 0.0]]).repeat(5, 1)
    given = GivenClasses(make_annotations((5,), 4), CPU)
    seen = CheckedViews(rows=np.arange(5), views=views, erased=erased)
    return to_device(rows, seen, Thresholds.none(4), given, device=CPU, momentum=0.8)


@pytest.mark.parametrize("ema", ["plain", "debiased"])
def test_the_memory_keeps_the_row_of_a_mixup_and_the_cells_of_a_pasted_box(ema):
    erased = MIX.hidden_boxes(G)
    assert erased.tolist() == [[0, 0, 0, 0], [0, 0, 1, 1], [0.5, 0, 0.5, 0.5], [0, 0, 1, 1], [0, 0, 0, 0]]
    stored, unmixed = stored_batch(erased, ema), stored_batch(None, ema)
    logits, maps = torch.randn(5, 4, generator=GENERATOR), torch.rand(5, 4, G, G, generator=GENERATOR)
    settings = StoreConfig(ema=ema)
    found, usual = (updated_averages(each, logits, maps, settings) for each in (stored, unmixed))
    assert found.keys() == usual.keys() == stored.arrays.keys()
    for name, values in found.items():
        assert torch.equal(values[[1, 3]], stored.arrays[name][[1, 3]]), name
        assert torch.equal(values[[0, 4]], usual[name][[0, 4]]), name
    heatmaps, before = found["heatmaps"][2], stored.arrays["heatmaps"][2]
    assert torch.equal(heatmaps[:, :G, G:], before[:, :G, G:])
    assert torch.equal(heatmaps[:, :, :G], usual["heatmaps"][2, :, :, :G])
    assert torch.equal(found["cell_visits"][2, :G, G:], stored.arrays["cell_visits"][2, :G, G:])
    assert torch.equal(found["scores"][2], usual["scores"][2])


def test_batches_get_their_mix_and_the_boxes_that_the_memory_leaves_out():
    images = torch.zeros(5, 3, SIZE, SIZE, dtype=torch.uint8)
    batch = make_batch(IDS, images, torch.zeros(5, 4, dtype=torch.int8))
    mixing = Mixing(mixup=0.1, cutmix=1.0)
    (found,) = mix_batches([batch], mixing, size=SIZE, map_side=G, seed=1, epoch=2, pin_memory=False)
    mix = Mix(rows=torch.from_numpy(rows_of(mixing, IDS)))
    assert torch.equal(found.mix, mix.rows)
    assert torch.equal(found.erased, mix.hidden_boxes(G))
    for name in ("ids", "images", "labels", "views"):
        assert getattr(found, name) is getattr(batch, name)


# Refused


def mistakes(mix, **sections):
    with pytest.raises(ConfigError) as raised:
        config_of(data={"mix": mix, **sections.pop("data", {})}, **sections)
    return str(raised.value)


def test_a_mix_that_cannot_be_is_refused():
    assert "data.mix: mixes no images" in mistakes({})
    assert "data.mix: mixes no images" in mistakes({"mixup": 0.1}, data={"batch_size": 1})
    assert "data.mix.cutmix_share: has no effect" in mistakes({"mixup": 0.1, "cutmix_share": 0.1})
    assert "choose it or data.erase" in mistakes({"mixup": 0.1}, data={"erase": {}})
    assert "at most 1" in mistakes({"mixup": 8.0}) or "less than or equal to 1" in mistakes({"mixup": 8.0})


@pytest.mark.parametrize("base", sorted(name for name, term in BASES.items() if not term.mixes))
def test_a_loss_that_has_no_loss_of_mixed_images_is_refused(base):
    found = mistakes({"cutmix": 1.0}, objective={"base": base, "consistency": "none"})
    assert f"data.mix: objective.base {base} has no loss of two images in one; choose an, an_ls, asl" in found
