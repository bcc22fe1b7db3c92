"""What images are ranked by when heatmaps have a say, against the formula written out."""

import math

import pytest
import torch

from bigscl.memory.heatmaps import spatial_score


def reference(scores, heat, annotated):
    """sqrt(s * mean of the hottest cells of heat * (1 - 0.5 * heat of the label / its peak))."""
    num_classes, side = heat.shape[0], heat.shape[-1]
    cells = range(side * side)
    flat = [heat[c].flatten().tolist() for c in range(num_classes)]
    named = [max([flat[c][n] for c in range(num_classes) if annotated[c]], default=0.0) for n in cells]
    peak = max(named)
    values = []
    for c in range(num_classes):
        discounted = [flat[c][n] * (1 - 0.5 * (named[n] / peak if peak else 0.0)) for n in cells]
        hottest = sorted(discounted, reverse=True)[: max(1, round(0.04 * side * side))]
        value = math.sqrt(float(scores[c]) * sum(hottest) / len(hottest))
        values.append(1.0 if annotated[c] else value)
    return values


@pytest.mark.parametrize("num_annotated", [0, 1, 2])
@pytest.mark.parametrize("side", [3, 10, 14])
def test_it_is_the_formula(side, num_annotated):
    generator = torch.Generator().manual_seed(side + num_annotated)
    scores = torch.rand(4, 5, generator=generator).half()
    heat = torch.rand(4, 5, side, side, generator=generator)
    annotated = torch.zeros(4, 5, dtype=torch.bool)
    annotated[:, :num_annotated] = True
    found = spatial_score(scores, heat, annotated)
    assert found.dtype == torch.float16
    for n in range(4):
        expected = torch.tensor(reference(scores[n], heat[n], annotated[n]))
        torch.testing.assert_close(found[n].float(), expected, rtol=1e-3, atol=1e-3)


def test_kept_classes_rank_as_in_the_dense_layout():
    generator = torch.Generator().manual_seed(0)
    scores, heat = torch.rand(3, 6, generator=generator).half(), torch.rand(3, 6, 4, 4, generator=generator)
    annotated = torch.zeros(3, 6, dtype=torch.bool)
    annotated[:, 2] = True
    classes = torch.tensor([[1, 2, 5], [0, 2, 3], [2, 4, 5]])
    kept = heat[torch.arange(3)[:, None], classes]
    dense = spatial_score(scores, heat, annotated)
    assert torch.equal(spatial_score(scores, kept, annotated, classes), dense.gather(1, classes))


def test_a_label_that_was_never_seen_discounts_nothing():
    heat = torch.zeros(1, 2, 4, 4)
    heat[0, 1] = 0.36
    found = spatial_score(torch.tensor([[1.0, 0.25]]), heat, torch.tensor([[True, False]]))
    torch.testing.assert_close(found[0, 1].float(), torch.tensor(0.3), rtol=1e-3, atol=0)
