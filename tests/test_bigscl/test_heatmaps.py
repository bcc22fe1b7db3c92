"""Heatmap geometry against slow per-sample references, analytic maps, and the promises of the average."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from bigscl.memory.heatmaps import (
    blend,
    blend_scores,
    gather_classes,
    remaining_start,
    to_image,
    to_view,
    without_initial_value,
)

FULL = [0.0, 0.0, 1.0, 1.0, 0.0]


def as_views(*rows, dtype=torch.float32):
    return torch.tensor(rows, dtype=dtype)


def aligned_view(box, cells):
    """The view of a box in whole cells; in float64, for 13/14 is not a float32 and a 1-cell box shows it."""
    *edges, flip = box
    return as_views([*(edge / cells for edge in edges), float(flip)], dtype=torch.float64)


def noise(*shape, seed=0):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


@st.composite
def view_batches(draw, smallest=0.01):
    """One to four views of any size and aspect that lie in the image."""

    def view():
        width, height = (draw(st.floats(smallest, 1)) for _ in range(2))
        left, top = (draw(st.floats(0, 1)) * (1 - extent) for extent in (width, height))
        return [left, top, width, height, float(draw(st.booleans()))]

    return as_views(*(view() for _ in range(draw(st.integers(1, 4)))))


@st.composite
def aligned_boxes(draw, cells):
    """A box (left, top, width, height) in whole cells, and a flip."""
    width, height = draw(st.integers(1, cells)), draw(st.integers(1, cells))
    left, top = draw(st.integers(0, cells - width)), draw(st.integers(0, cells - height))
    return left, top, width, height, draw(st.booleans())


def bilinear(image, x, y):
    """One sample of [H,W] at pixel position (x, y), in plain Python: the definition."""
    height, width = image.shape
    x, y = min(max(x, 0.0), width - 1.0), min(max(y, 0.0), height - 1.0)
    x0, y0 = int(x), int(y)
    x1, y1 = min(x0 + 1, width - 1), min(y0 + 1, height - 1)
    a, b = x - x0, y - y0
    upper = (1 - a) * image[y0, x0] + a * image[y0, x1]
    lower = (1 - a) * image[y1, x0] + a * image[y1, x1]
    return float((1 - b) * upper + b * lower)


def slow_to_view(heatmap, view, size):
    """One map [W,W] through one view, cell by cell."""
    left, top, width, height, flip = (float(v) for v in view)
    side = heatmap.shape[-1]
    seen = torch.empty(size, size)
    for row in range(size):
        for column in range(size):
            x = left + width * (column + 0.5) / size
            y = top + height * (row + 0.5) / size
            target = size - 1 - column if flip else column
            seen[row, target] = bilinear(heatmap, x * side - 0.5, y * side - 0.5)
    return seen


def slow_to_image(scores, view, size):
    """One map [G,G] put back into the image, cell by cell; NaN where the view does not reach."""
    left, top, width, height, flip = (float(v) for v in view)
    scores = scores.flip(-1) if flip else scores
    side = scores.shape[-1]
    image = torch.full((size, size), torch.nan)
    for row in range(size):
        for column in range(size):
            x, y = (column + 0.5) / size, (row + 0.5) / size
            if left <= x < left + width and top <= y < top + height:
                inside_x, inside_y = (x - left) / width, (y - top) / height
                image[row, column] = bilinear(scores, inside_x * side - 0.5, inside_y * side - 0.5)
    return image


def ramp(size, slope_x, slope_y):
    """A map whose value is slope_x * x + slope_y * y at its cells' centres."""
    centres = (torch.arange(size) + 0.5) / size
    return slope_x * centres[None, :] + slope_y * centres[:, None]


@settings(max_examples=60, deadline=None)
@given(views=view_batches(), side=st.sampled_from([1, 2, 5, 8, 14]), size=st.sampled_from([1, 3, 7]))
def test_to_view_equals_sampling_cell_by_cell(views, side, size):
    heatmaps = noise(len(views), 2, side, side)
    seen = to_view(heatmaps, views, size)
    assert seen.shape == (len(views), 2, size, size)
    for n, view in enumerate(views):
        for c in range(2):
            torch.testing.assert_close(
                seen[n, c], slow_to_view(heatmaps[n, c], view, size), atol=1e-6, rtol=0
            )


@settings(max_examples=60, deadline=None)
@given(views=view_batches(), side=st.sampled_from([1, 3, 7]), size=st.sampled_from([1, 2, 5, 8, 14]))
def test_to_image_equals_sampling_cell_by_cell(views, side, size):
    maps = noise(len(views), 2, side, side)
    images, mask = to_image(maps, views, size)
    assert images.shape == (len(views), 2, size, size)
    assert torch.isfinite(images).all()
    for n, view in enumerate(views):
        for c in range(2):
            expected = slow_to_image(maps[n, c], view, size)
            assert torch.equal(mask[n], ~expected.isnan())
            torch.testing.assert_close(images[n, c][mask[n]], expected[mask[n]], atol=1e-6, rtol=0)


@settings(max_examples=100, deadline=None)
@given(box=aligned_boxes(14), size=st.sampled_from([3, 5, 7]))
def test_to_view_of_an_aligned_box_is_crop_then_interpolate(box, size):
    left, top, width, height, flip = box
    heatmaps = noise(1, 3, 14, 14)
    cropped = heatmaps[:, :, top : top + height, left : left + width]
    expected = F.interpolate(cropped, size=(size, size), mode="bilinear", align_corners=False)
    expected = expected.flip(-1) if flip else expected
    seen = to_view(heatmaps, aligned_view(box, 14), size)
    # Where the box has fewer cells than the view, view cells near its edge also see the cells beyond it.
    rows = _away_from_the_edge(height, size)
    columns = _away_from_the_edge(width, size)
    torch.testing.assert_close(
        seen[:, :, rows][..., columns], expected[:, :, rows][..., columns], atol=1e-6, rtol=0
    )


def _away_from_the_edge(cells, size):
    """View cells whose bilinear neighbours all lie within a crop of so many cells."""
    positions = (torch.arange(size) + 0.5) * cells / size - 0.5
    return (positions >= 0) & (positions <= cells - 1)


@settings(max_examples=100, deadline=None)
@given(box=aligned_boxes(14), side=st.sampled_from([3, 5, 7]))
def test_to_image_of_an_aligned_box_is_interpolate_then_paste(box, side):
    left, top, width, height, flip = box
    maps = noise(1, 3, side, side)
    patch = F.interpolate(
        maps.flip(-1) if flip else maps, size=(height, width), mode="bilinear", align_corners=False
    )
    expected = torch.zeros(1, 3, 14, 14)
    expected[:, :, top : top + height, left : left + width] = patch
    covered = torch.zeros(1, 14, 14, dtype=torch.bool)
    covered[:, top : top + height, left : left + width] = True
    images, mask = to_image(maps, aligned_view(box, 14), 14)
    assert torch.equal(mask, covered)
    torch.testing.assert_close(torch.where(mask[:, None], images, 0), expected, atol=1e-6, rtol=0)


@settings(max_examples=100, deadline=None)
@given(views=view_batches(smallest=0.2))
def test_to_image_undoes_to_view_inside_the_crop(views):
    heatmaps = ramp(16, 0.9, -0.4).expand(len(views), 1, 16, 16)
    images, mask = to_image(to_view(heatmaps, views, 8), views, 16)
    starts, extents = views[:, :2, None], views[:, 2:4, None]
    inside = ((torch.arange(16) + 0.5) / 16 - starts) / extents
    # Half a view cell from the crop's edge and a view cell from the image's, nothing was clamped.
    centres = (torch.arange(16) + 0.5) / 16
    margin = 0.5 / 8
    unclamped = (inside >= margin) & (inside <= 1 - margin)
    unclamped &= (centres - extents / 8 >= 0.5 / 16) & (centres + extents / 8 <= 15.5 / 16)
    interior = unclamped[:, 1, :, None] & unclamped[:, 0, None, :]
    assert (interior <= mask).all()
    error = (images - heatmaps).abs()[:, 0][interior]
    assert error.numel() == 0 or error.max() < 2e-6


@settings(max_examples=50, deadline=None)
@given(views=view_batches())
def test_flips_are_exact(views):
    flipped = views.clone()
    flipped[:, 4] = 1 - views[:, 4]
    heatmaps, maps = noise(len(views), 3, 14, 14), noise(len(views), 3, 7, 7, seed=1)
    assert torch.equal(to_view(heatmaps, flipped, 7), to_view(heatmaps, views, 7).flip(-1))
    images, mask = to_image(maps, views, 14)
    mirrored, same_mask = to_image(maps.flip(-1), flipped, 14)
    assert torch.equal(images, mirrored)
    assert torch.equal(mask, same_mask)


def test_crops_that_tile_the_image_cover_each_cell_once():
    views = as_views(
        [0, 0, 0.25, 0.5, 0], [0.25, 0, 0.75, 0.5, 1], [0, 0.5, 0.5, 0.5, 1], [0.5, 0.5, 0.5, 0.5, 0]
    )
    _, mask = to_image(noise(4, 1, 7, 7), views, 14)
    assert torch.equal(mask.sum(0), torch.ones(14, 14, dtype=torch.long))


@pytest.mark.parametrize("extent", [0.0, 1e-6, 0.02])
def test_a_crop_between_two_cell_centres_updates_nothing(extent):
    heatmaps, maps = noise(1, 2, 14, 14), noise(1, 2, 7, 7, seed=1)
    views = as_views([5 / 14, 5 / 14, extent, extent, 0])
    assert torch.equal(blend(heatmaps, maps, views, 0.8)[0], heatmaps)
    assert torch.isfinite(to_view(heatmaps, views, 7)).all()


def test_an_empty_crop_on_the_centre_of_a_cell_gives_finite_maps():
    images, mask = to_image(noise(1, 1, 2, 2), as_views([0.125, 0.125, 0, 0, 0]), 4)
    assert torch.isfinite(images).all()
    assert not mask.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@settings(max_examples=50, deadline=None)
@given(views=view_batches())
def test_blend_averages_covered_cells_and_keeps_the_bits_of_the_others(dtype, views):
    heatmaps = noise(len(views), 3, 14, 14).to(dtype)
    heatmaps[:, 1] = -0.0  # whose sign is lost in any sum
    maps = noise(len(views), 3, 7, 7, seed=1)
    blended, _ = blend(heatmaps, maps, views, 0.8)
    images, mask = to_image(maps, views, 14)
    covered = mask[:, None].expand_as(heatmaps)
    as_int = torch.int16 if dtype == torch.float16 else torch.int32
    assert blended.dtype == dtype
    assert torch.equal(blended.view(as_int)[~covered], heatmaps.view(as_int)[~covered])
    expected = (0.8 * heatmaps.float() + 0.2 * images).to(dtype)
    torch.testing.assert_close(blended[covered], expected[covered], atol=1e-6, rtol=1e-3)


def test_blend_does_not_touch_its_inputs():
    heatmaps, maps, counts = noise(1, 2, 4, 4), noise(1, 2, 2, 2), torch.zeros(1, 4, 4, dtype=torch.uint8)
    before = [t.clone() for t in (heatmaps, maps, counts)]
    blend(heatmaps, maps, as_views(FULL), 0.5, counts=counts, erased=torch.tensor([[0, 0, 0.5, 0.5]]))
    assert all(torch.equal(a, b) for a, b in zip(before, (heatmaps, maps, counts), strict=True))


def test_erased_box_is_given_in_the_flipped_view():
    heatmaps, maps = torch.zeros(2, 1, 8, 8), torch.ones(2, 1, 4, 4)
    # The left half of what the network was fed is erased: the left half of the crop, or its right if flipped.
    views = as_views([0.5, 0, 0.5, 1, 0], [0.5, 0, 0.5, 1, 1])
    erased = torch.tensor([[0.0, 0.25, 0.5, 0.5]] * 2)
    updated = blend(heatmaps, maps, views, 0.0, erased=erased)[0][:, 0].bool()
    expected = torch.zeros(2, 8, 8, dtype=torch.bool)
    expected[:, :, 4:] = True
    expected[0, 2:6, 4:6] = False
    expected[1, 2:6, 6:8] = False
    assert torch.equal(updated, expected)


@pytest.mark.parametrize("box", [[0.0, 0, 0, 0], [0.0, 0, 0, 1], [0.5, 0.5, 1, 0]])
def test_an_erased_box_without_area_erases_nothing(box):
    heatmaps, maps = torch.zeros(1, 1, 4, 4), torch.ones(1, 1, 2, 2)
    # The crop starts on the centre of a cell, so that cell lies on the corner of the empty box.
    view = as_views([0.125, 0.125, 0.75, 0.75, 0])
    with_box, _ = blend(heatmaps, maps, view, 0.0, erased=torch.tensor([box]))
    assert torch.equal(with_box, blend(heatmaps, maps, view, 0.0)[0])
    assert with_box[0, 0, 0, 0] == 1


def test_debiased_average_is_the_mean_of_the_visits_until_momentum_bounds_it():
    heatmaps = torch.ones(1, 1, 4, 4)
    counts = torch.zeros(1, 4, 4, dtype=torch.uint8)
    half = as_views([0, 0, 0.5, 1, 0])
    values = [0.2, 0.6, 0.1]
    for value in values:
        maps = torch.full((1, 1, 2, 2), value)
        heatmaps, counts = blend(heatmaps, maps, half, 0.8, counts=counts, debiased=True)
    torch.testing.assert_close(heatmaps[..., :2], torch.full((1, 1, 4, 2), sum(values) / 3))
    assert (heatmaps[..., 2:] == 1).all()
    assert counts.dtype == torch.uint8
    assert (counts[..., :2] == 3).all()
    assert (counts[..., 2:] == 0).all()
    many = torch.full((1, 4, 4), 200, dtype=torch.uint8)
    ones, zeros = torch.ones(1, 1, 4, 4), torch.zeros(1, 1, 2, 2)
    bounded, _ = blend(ones, zeros, half, 0.8, counts=many, debiased=True)
    torch.testing.assert_close(bounded[..., :2], torch.full((1, 1, 4, 2), 0.8))


def test_a_plain_average_counts_the_visits_of_its_cells_and_is_the_same_as_without():
    heatmaps, maps = noise(2, 3, 6, 6).half(), noise(2, 3, 3, 3, seed=1)
    views = as_views([0.1, 0.2, 0.6, 0.7, 1], [0, 0, 0.5, 1, 0])
    counts = torch.full((2, 6, 6), 3, dtype=torch.uint8)
    counted, after = blend(heatmaps, maps, views, 0.8, counts=counts)
    assert torch.equal(counted, blend(heatmaps, maps, views, 0.8)[0])
    assert torch.equal(after == 4, to_image(maps, views, 6)[1])
    assert ((after == 4) | (after == 3)).all()


@pytest.mark.parametrize("debiased", [False, True])
def test_evidence_is_the_average_of_a_heatmap_that_started_at_zero(debiased):
    """What the start has left is all that is taken away, for every cell by its own visits."""
    heatmaps = torch.tensor([1.0, 0.0])[None, :, None, None].expand(1, 2, 8, 8)
    from_zero, counts = torch.zeros(1, 2, 8, 8), torch.zeros(1, 8, 8, dtype=torch.uint8)
    views = as_views([0, 0, 0.5, 1, 0]), as_views([0.25, 0.25, 0.75, 0.5, 1]), as_views(FULL)
    for seed, view in enumerate(views):
        maps = noise(1, 2, 4, 4, seed=seed)
        heatmaps, after = blend(heatmaps, maps, view, 0.8, counts=counts, debiased=debiased)
        from_zero, counts = blend(from_zero, maps, view, 0.8, counts=counts, debiased=debiased)
        assert torch.equal(after, counts)
    remaining = remaining_start(counts, 0.8, debiased=debiased)
    seen = without_initial_value(heatmaps, torch.tensor([[1, 0]]), remaining)
    torch.testing.assert_close(seen, from_zero)


def test_counts_stop_at_255():
    counts = torch.full((1, 4, 4), 255, dtype=torch.uint8)
    _, after = blend(torch.zeros(1, 1, 4, 4), torch.zeros(1, 1, 2, 2), as_views(FULL), 0.8, counts=counts)
    assert (after == 255).all()


def test_scores_average_in_float32_and_debias_by_visits():
    scores, pooled = noise(3, 5).half(), noise(3, 5, seed=1)
    plain = blend_scores(scores, pooled, 0.8)
    assert plain.dtype == torch.float16
    torch.testing.assert_close(plain, (0.8 * scores.float() + 0.2 * pooled).half())
    debiased = blend_scores(scores, pooled, 0.8, visits=torch.tensor([0, 1, 100]))
    assert torch.equal(debiased[0], pooled[0].half())
    torch.testing.assert_close(debiased[1], ((scores[1].float() + pooled[1]) / 2).half())
    torch.testing.assert_close(debiased[2], plain[2])


def test_gathered_maps_are_those_of_each_images_own_classes():
    maps = noise(3, 20, 2, 2)
    classes = torch.tensor([[3, 19], [0, 0], [7, 2]], dtype=torch.uint16)
    gathered = gather_classes(maps, classes)
    for n in range(3):
        for j in range(2):
            assert torch.equal(gathered[n, j], maps[n, int(classes[n, j])])


def test_blend_of_gathered_classes_equals_the_dense_blend():
    heatmaps, maps = noise(2, 9, 6, 6).half(), noise(2, 9, 3, 3, seed=1)
    classes = torch.tensor([[8, 1], [4, 5]])
    views = as_views([0.1, 0.2, 0.6, 0.7, 1], FULL)
    dense = gather_classes(blend(heatmaps, maps, views, 0.8)[0], classes)
    top, _ = blend(gather_classes(heatmaps, classes), gather_classes(maps, classes), views, 0.8)
    assert torch.equal(dense, top)


def test_autocast_and_gradients_stay_out():
    heatmaps, maps = noise(1, 2, 14, 14), noise(1, 2, 7, 7, seed=1).requires_grad_()
    views = as_views([0.13, 0.21, 0.5, 0.61, 1])
    plain = to_view(heatmaps, views, 7), blend(heatmaps, maps, views, 0.8)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under_autocast = to_view(heatmaps, views, 7), blend(heatmaps, maps, views, 0.8)[0]
    for a, b in zip(plain, under_autocast, strict=True):
        assert torch.equal(a, b)
        assert not a.requires_grad
