"""Losses against the equations written naively in float64, one sample and one class at a time."""

import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigscl.losses import consistency as consistencies
from bigscl.losses import cross_entropy as losses
from bigscl.losses import role as regularised
from bigscl.losses.cross_entropy import probabilities
from bigscl.losses.objective import Base, Consistency, Objective
from bigscl.losses.registry import LossInputs

B, L, G, K = 4, 7, 3, 2.9
BASES = get_args(Base)
CLASSIC = ("bce", "an", "an_ls", "wan", "en", "ep", "epr", "role")
"""Those of the paper and of Cole et al.; the others are in test_field_losses.py."""


def random_case(seed):
    """Logits, labels of all three kinds, expected positives also where labels are known, estimates."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3 * torch.randn(B, L, generator=generator, dtype=torch.float64)
    estimates = 3 * torch.randn(B, L, generator=generator, dtype=torch.float64)
    labels = torch.randint(-1, 2, (B, L), generator=generator).to(torch.int8)
    expected = torch.rand(B, L, generator=generator) < 0.5
    return logits.requires_grad_(), labels, expected, estimates.requires_grad_()


def compute(base, logits, labels, expected, estimates):
    """The loss of the library under test."""
    return {
        "bce": lambda: losses.bce(logits, labels),
        "an": lambda: losses.an(logits, labels),
        "an_ls": lambda: losses.an_ls(logits, labels, smoothing=0.1),
        "wan": lambda: losses.wan(logits, labels),
        "en": lambda: losses.en(logits, labels, expected),
        "ep": lambda: losses.ep(logits, labels, expected),
        "epr": lambda: regularised.epr(logits, labels, K),
        "role": lambda: regularised.role(logits, estimates, labels, K),
    }[base]()


def reference(base, logits, labels, expected, estimates):
    """The mean over the batch of the published loss, term by term, with plain sigmoid and log."""
    f, y = logits.sigmoid(), estimates.sigmoid()
    total = 0.0
    for n in range(B):
        for i in range(L):
            total = total + reference_term(
                base, f[n, i], y[n, i], int(labels[n, i]), bool(expected[n, i])
            ) / (B * L)
    if base == "epr":
        total = total + (f.sum() / B - K) ** 2 / L**2
    if base == "role":
        total = total + 0.5 * ((f.sum() / B - K) ** 2 + (y.sum() / B - K) ** 2) / L**2
    return total


def reference_term(base, f, y, z, is_expected):
    positive, negative = -torch.log(f), -torch.log(1 - f)
    nothing = 0 * f
    if base == "bce":
        return positive if z == 1 else negative if z == 0 else nothing
    if base == "an":
        return positive if z == 1 else negative
    if base == "an_ls":
        return 0.9 * positive + 0.1 * negative if z == 1 else 0.9 * negative + 0.1 * positive
    if base == "wan":
        return positive if z == 1 else negative / (L - 1)
    if base == "en":
        if z == 1:
            return positive
        return negative if z == 0 or not is_expected else nothing
    if base == "ep":
        return positive if z == 1 or (z == -1 and is_expected) else negative
    if base == "epr":
        return positive if z == 1 else negative if z == 0 else nothing
    known_f = positive if z == 1 else negative if z == 0 else nothing
    known_y = -torch.log(y) if z == 1 else -torch.log(1 - y) if z == 0 else nothing
    taught_f = -(y.detach() * torch.log(f) + (1 - y.detach()) * torch.log(1 - f))
    taught_y = -(f.detach() * torch.log(y) + (1 - f.detach()) * torch.log(1 - y))
    return 0.5 * (known_f + known_y + taught_f + taught_y)


@pytest.mark.parametrize("base", CLASSIC)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_base_losses_and_their_gradients_equal_the_published_equations(base, seed):
    case = random_case(seed)
    logits, estimates = case[0], case[3]
    values = compute(base, *case)
    assert values.shape == (B,)
    expected = reference(base, *case)
    torch.testing.assert_close(values.mean(), expected, rtol=1e-12, atol=1e-12)
    inputs = [logits, estimates] if base == "role" else [logits]
    for ours, theirs in zip(
        torch.autograd.grad(values.mean(), inputs), torch.autograd.grad(expected, inputs), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize("base", ["bce", "an", "an_ls", "wan", "en", "ep"])
def test_each_value_belongs_to_its_own_sample(base):
    case = random_case(1)
    whole = compute(base, *case)
    for n in range(B):
        alone = compute(base, *(part[n : n + 1] for part in case))
        torch.testing.assert_close(alone[0], whole[n], rtol=1e-12, atol=0)


def test_a_batch_of_no_samples_has_no_values():
    logit_map = torch.zeros(0, L, G, G, requires_grad=True)
    labels, expected = torch.zeros(0, L, dtype=torch.int8), torch.zeros(0, L, dtype=torch.bool)
    target, classes = torch.zeros(0, 2, G, G), torch.zeros(0, 2, dtype=torch.int64)
    loss = Objective()(
        LossInputs(
            logits=logit_map.mean((2, 3)),
            labels=labels,
            maps=logit_map.sigmoid(),
            target=target,
            classes=classes,
            expected=expected,
        )
    )
    assert loss.total.shape == (0,)
    loss.total.sum().backward()


@pytest.mark.parametrize("base", ["epr", "role"])
def test_count_penalty_is_the_same_however_ranks_share_the_batch(base):
    logits, labels, _, estimates = random_case(3)
    whole = compute(base, logits, labels, None, estimates).mean()
    counts = [regularised.predicted_count(part).mean() for part in (logits, estimates)]
    parts = []
    for rows in (slice(0, 1), slice(1, 4)):
        if base == "epr":
            parts.append(regularised.epr(logits[rows], labels[rows], K, (counts[0],)))
        else:
            parts.append(regularised.role(logits[rows], estimates[rows], labels[rows], K, tuple(counts)))
    shared = torch.cat(parts).sum() / B
    torch.testing.assert_close(shared, whole, rtol=1e-12, atol=0)
    for part in [logits, estimates] if base == "role" else [logits]:
        (ours,) = torch.autograd.grad(shared, part, retain_graph=True)
        (theirs,) = torch.autograd.grad(whole, part, retain_graph=True)
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-14)


def norm_reference(differences, norm):
    """The norm of a list of differences, in plain numbers."""
    squares = sum(difference**2 for difference in differences)
    return {
        "mse": squares / len(differences),
        "rms": math.sqrt(squares / len(differences)),
        "l2": math.sqrt(squares),
    }[norm]


@pytest.mark.parametrize("norm", ["mse", "rms", "l2"])
def test_consistency_losses_equal_the_norms_written_out(norm):
    generator = torch.Generator().manual_seed(5)
    logit_map = 2 * torch.randn(B, L, G, G, generator=generator, dtype=torch.float64)
    target = torch.rand(B, L, G, G, generator=generator, dtype=torch.float64)
    spatial = consistencies.scl_dense(logit_map.sigmoid(), target, norm=norm)
    pooled = consistencies.cl(logit_map[:, :, 0, 0], target[:, :, 0, 0], norm=norm)
    for n in range(B):
        differences = (logit_map[n].sigmoid() - target[n]).flatten().tolist()
        assert spatial[n].item() == pytest.approx(norm_reference(differences, norm), rel=1e-12)
        differences = (logit_map[n, :, 0, 0].sigmoid() - target[n, :, 0, 0]).tolist()
        assert pooled[n].item() == pytest.approx(norm_reference(differences, norm), rel=1e-12)


@pytest.mark.parametrize("norm", ["mse", "rms", "l2"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), k=st.integers(1, L))
def test_topk_consistency_equals_dense_consistency_with_zeros_elsewhere(norm, seed, k):
    generator = torch.Generator().manual_seed(seed)
    logit_map = 2 * torch.randn(B, L, G, G, generator=generator, dtype=torch.float64)
    logit_map.requires_grad_()
    classes = torch.stack([torch.randperm(L, generator=generator)[:k] for _ in range(B)])
    target = torch.rand(B, k, G, G, generator=generator, dtype=torch.float64)
    dense = torch.zeros(B, L, G, G, dtype=torch.float64)
    for n in range(B):
        for j in range(k):
            dense[n, classes[n, j]] = target[n, j]
    ours = consistencies.scl_topk(logit_map.sigmoid(), classes.to(torch.uint16), target, norm=norm)
    theirs = consistencies.scl_dense(logit_map.sigmoid(), dense, norm=norm)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    weights = torch.rand(B, generator=generator, dtype=torch.float64)
    slopes = [torch.autograd.grad((weights * loss).sum(), logit_map)[0] for loss in (ours, theirs)]
    torch.testing.assert_close(*slopes, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("norm", ["mse", "rms", "l2"])
def test_gradcheck_of_consistency_losses(norm):
    generator = torch.Generator().manual_seed(6)
    maps = torch.randn(2, 4, 2, 2, generator=generator, dtype=torch.float64, requires_grad=True)
    target = torch.rand(2, 4, 2, 2, generator=generator, dtype=torch.float64)
    classes = torch.tensor([[2, 0], [1, 3]])
    assert torch.autograd.gradcheck(lambda x: consistencies.scl_dense(x.sigmoid(), target, norm=norm), [maps])
    assert torch.autograd.gradcheck(
        lambda x: consistencies.scl_topk(x.sigmoid(), classes, target[:, :2], norm=norm), [maps]
    )
    assert torch.autograd.gradcheck(
        lambda x: consistencies.cl(x[:, :, 0, 0], target[:, :, 0, 0], norm=norm), [maps]
    )


@pytest.mark.parametrize("norm", ["mse", "rms", "l2"])
def test_a_perfect_match_has_value_and_gradient_zero(norm):
    logits = torch.zeros(2, 3, requires_grad=True)
    loss = consistencies.cl(logits, torch.full((2, 3), 0.5), norm=norm)
    (slope,) = torch.autograd.grad(loss.sum(), logits)
    assert not loss.any()
    assert not slope.any()


def test_targets_carry_no_gradient():
    target = torch.rand(2, 3, 2, 2, requires_grad=True)
    maps = torch.randn(2, 3, 2, 2, requires_grad=True)
    classes = torch.tensor([[0, 1, 2], [2, 0, 1]])
    total = consistencies.scl_dense(maps.sigmoid(), target) + consistencies.scl_topk(
        maps.sigmoid(), classes, target
    )
    total += consistencies.cl(maps[:, :, 0, 0], target[:, :, 0, 0])
    total.sum().backward()
    assert target.grad is None
    assert maps.grad is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("base", CLASSIC)
def test_base_losses_are_finite_and_exact_for_large_logits(base, dtype):
    _, labels, expected, _ = random_case(7)
    logits = (
        torch.tensor([-100.0, 100.0, -20.0, 20.0, -1.0, 1.0, 0.0]).repeat(B, 1).to(dtype).requires_grad_()
    )
    estimates = -logits.detach()
    with torch.autocast("cpu", torch.bfloat16):
        values = compute(base, logits, labels, expected, estimates)
    assert values.dtype == torch.float32
    exact_logits = logits.detach().double().requires_grad_()
    exact = compute(base, exact_logits, labels, expected, estimates.double())
    torch.testing.assert_close(values.double(), exact, rtol=1e-6, atol=1e-7)
    (slope,) = torch.autograd.grad(values.sum(), logits)
    (exact_slope,) = torch.autograd.grad(exact.sum(), exact_logits)
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(slope.double(), exact_slope, rtol=tolerance, atol=1e-7)


def test_easy_negatives_keep_their_small_gradients_in_float32():
    logits = torch.full((1, 5), -20.0, requires_grad=True)
    (slope,) = torch.autograd.grad(losses.an(logits, torch.full((1, 5), -1, dtype=torch.int8)).sum(), logits)
    assert slope[0, 0].item() == pytest.approx(1 / (1 + math.exp(20)) / 5, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_consistency_is_computed_in_float32_for_large_logits(dtype):
    logit_map = torch.tensor([[-100.0, 100.0], [3.0, -3.0]]).expand(2, 5, 2, 2).to(dtype)
    logit_map = logit_map.contiguous().requires_grad_()
    classes, target = torch.tensor([[0, 3], [1, 2]]), torch.full((2, 2, 2, 2), 0.3)
    with torch.autocast("cpu", torch.bfloat16):
        loss = consistencies.scl_topk(probabilities(logit_map), classes, target)
    exact = consistencies.scl_topk(logit_map.detach().double().sigmoid(), classes, target.double())
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss.double(), exact, rtol=1e-6, atol=0)
    assert torch.autograd.grad(loss.sum(), logit_map)[0].isfinite().all()


def objective_inputs(seed=8):
    logits, labels, expected, estimates = random_case(seed)
    generator = torch.Generator().manual_seed(seed)
    return LossInputs(
        logits=logits,
        labels=labels,
        maps=torch.rand(B, L, G, G, generator=generator, dtype=torch.float64),
        logit_map=logits[..., None, None].expand(B, L, G, G),
        scores=torch.rand(B, L, generator=generator, dtype=torch.float64),
        target=torch.rand(B, L, G, G, generator=generator, dtype=torch.float64),
        weight=torch.rand(B, 1, G, G, generator=generator, dtype=torch.float64),
        expected=expected,
        pseudo_positives=expected & (labels != 0) & (torch.arange(L) % 2 == 0),
        positives_per_image=K,
        estimates=estimates,
        corrections=torch.rand(B, L, generator=generator) < 0.2,
        cuts=torch.rand(L, generator=generator, dtype=torch.float64),
        priors=torch.rand(L, generator=generator, dtype=torch.float64),
        given_share=torch.rand(L, generator=generator, dtype=torch.float64),
        epoch=2,
        progress=0.4,
    )


def weighted_rms(inputs):
    """Written out: the root of the mean, over classes and cells, of each weighted squared difference."""
    total = torch.zeros(B, dtype=torch.float64)
    for n in range(B):
        for c in range(L):
            for cell in range(G * G):
                difference = inputs.maps[n, c].flatten()[cell] - inputs.target[n, c].flatten()[cell]
                total[n] += inputs.weight[n, 0].flatten()[cell] * difference**2
    return (total / (L * G * G)).sqrt()


@pytest.mark.parametrize("base", CLASSIC)
@pytest.mark.parametrize("consistency", get_args(Consistency))
def test_objective_is_base_plus_gamma_times_consistency(base, consistency):
    inputs = objective_inputs()
    loss = Objective(base=base, consistency=consistency, norm="rms")(inputs, gamma=0.3)
    expected_base = compute(base, inputs.logits, inputs.labels, inputs.expected, inputs.estimates)
    expected_consistency = {
        "none": torch.zeros(B, dtype=torch.float64),
        "cl": consistencies.cl(inputs.logits, inputs.scores, norm="rms"),
        "scl": consistencies.scl_dense(inputs.maps, inputs.target, norm="rms"),
        "scl_corrected": weighted_rms(inputs),
    }[consistency]
    torch.testing.assert_close(loss.base, expected_base)
    torch.testing.assert_close(loss.consistency, expected_consistency)
    torch.testing.assert_close(loss.total, expected_base + 0.3 * expected_consistency)


def test_objective_takes_topk_targets_with_their_classes():
    inputs = objective_inputs()
    classes, target = torch.tensor([[0, 2]] * B), inputs.target[:, :2]
    loss = Objective(base="an")(replace(inputs, classes=classes, target=target))
    torch.testing.assert_close(loss.consistency, consistencies.scl_topk(inputs.maps, classes, target))


def test_corrected_topk_targets_equal_dense_ones_with_zeros_elsewhere():
    inputs = objective_inputs()
    classes = torch.tensor([[0, 2]] * B)
    dense = torch.zeros_like(inputs.target)
    dense[:, [0, 2]] = inputs.target[:, :2]
    objective = Objective(base="an", consistency="scl_corrected")
    top = objective(replace(inputs, classes=classes, target=inputs.target[:, :2]))
    torch.testing.assert_close(top.consistency, objective(replace(inputs, target=dense)).consistency)


@pytest.mark.parametrize("base", ["epr", "role"])
def test_objective_passes_on_the_mean_counts_of_the_global_batch(base):
    inputs, zero = objective_inputs(), torch.zeros((), dtype=torch.float64)
    objective = Objective(base=base, consistency="none")
    counts = (zero,) * (2 if base == "role" else 1)
    with_counts = objective(replace(inputs, mean_counts=counts)).base
    assert not torch.allclose(with_counts, objective(inputs).base)
    torch.testing.assert_close(
        with_counts - objective(replace(inputs, mean_counts=counts, positives_per_image=0.0)).base,
        torch.full((B,), K**2 / L**2, dtype=torch.float64),
    )


OPTIONAL = {"mean_counts", "class_means", "threshold", "classes"}
"""Fields that a loss uses and computes itself if they are missing, or that stand for all classes."""


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("consistency", get_args(Consistency))
def test_a_loss_is_computed_from_what_it_needs_and_names_what_is_missing(base, consistency):
    everything, objective = objective_inputs(), Objective(base=base, consistency=consistency)
    names = objective.needs - OPTIONAL
    given = {name: getattr(everything, name) for name in ("logits", "labels", *names)}
    assert objective(LossInputs(**given)).total.isfinite().all()
    for missing in names:
        with pytest.raises(ValueError, match=f"^{missing}: missing"):
            objective(LossInputs(**{**given, missing: None}))


@pytest.mark.parametrize(
    ("base", "consistency", "memory", "k"),
    [
        ("an", "none", False, False),
        ("role", "none", False, True),
        ("ep", "none", True, True),
        ("an", "cl", True, False),
        ("an", "scl", True, False),
        ("ll_cp", "none", False, False),
        ("em_apl", "none", True, False),
        ("crisp", "none", False, False),
    ],
)
def test_needs_say_which_objectives_need_a_memory_and_k(base, consistency, memory, k):
    objective = Objective(base=base, consistency=consistency)
    assert (objective.needs_memory, objective.needs_k) == (memory, k)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_pseudo_positives_are_positives_and_the_other_expected_ones_have_no_loss(seed):
    logits, labels, expected, _ = random_case(seed)
    pseudo_positives = expected & (torch.rand(B, L, generator=torch.Generator().manual_seed(seed)) < 0.5)
    f, total = logits.sigmoid(), torch.zeros(B, dtype=logits.dtype)
    for n in range(B):
        for i in range(L):
            z = int(labels[n, i])
            if z == 1 or (z == -1 and pseudo_positives[n, i]):
                total[n] -= torch.log(f[n, i]).detach() / L
            elif z == 0 or not expected[n, i]:
                total[n] -= torch.log(1 - f[n, i]).detach() / L
    torch.testing.assert_close(losses.enp(logits, labels, expected, pseudo_positives).detach(), total)
