"""The losses of other papers against their formulas, one label at a time, in plain Python floats.

The references are written from the papers and know nothing of tensors. Gradients are compared with central
differences of the references, in which what carries no gradient is held constant.
"""

import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bigscl.config import ConfigError, load_config, make_objective
from bigscl.losses.large_loss import num_large
from bigscl.losses.objective import BASES, Objective
from bigscl.losses.registry import GlobalBatch, LossInputs

CONFIGS = Path(__file__).parents[2] / "configs"
B, L = 5, 6
FIELD = ("focal", "asl", "hill", "splc", "gr", "ll_r", "ll_ct", "ll_cp", "em_apl", "crisp")
OTHERS = {
    "focal": {"gamma": 1.5},
    "asl": {"gamma_positive": 0.5, "gamma_negative": 0.7, "margin": 0.2},
    "hill": {"peak": 1.2, "margin": 0.3, "gamma": 0.5},
    "splc": {"threshold": 0.4, "start_epoch": 0, "margin": 0.4, "gamma": 0.5},
    "gr": {
        "slope": (1, 4),
        "intercept": (-1, -3),
        "center": (0.1, 0.9),
        "width": (0.3, 0.2),
        "q_positive": 0.6,
        "q_negative": 0.3,
    },
    "large_loss": {"rate": 0.11},
    "em_apl": {"alpha": 0.7, "beta": 0.3, "share": 0.5, "start_epoch": 1},
    "crisp": {"start_epoch": 3},
}
"""Settings other than the defaults: a reference that ignores one of them fails."""


def section_of(base):
    return "large_loss" if base.startswith("ll_") else base


def objective_of(base, *, defaults):
    others = {} if defaults else {section_of(base): OTHERS[section_of(base)]}
    return make_objective(base, "none", **others)


def random_inputs(seed, epoch=2, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def uniform(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)

    return LossInputs(
        logits=(3 * torch.randn(B, L, generator=generator, dtype=torch.float64)).to(dtype).requires_grad_(),
        labels=torch.randint(-1, 2, (B, L), generator=generator).to(torch.int8),
        scores=uniform(B, L),
        corrections=uniform(B, L) < 0.2,
        cuts=uniform(L),
        priors=uniform(L),
        given_share=0.1 + uniform(L),
        epoch=epoch,
        progress=epoch / 10,
    )


# The references


def sigmoid(z):
    return 1 / (1 + math.exp(-z))


def reference(base, settings, given, logits, constant):
    """The mean over batch and classes; of `constant`, the same logits, no gradient flows. Lists of lists."""
    labels, total = given.labels.tolist(), 0.0
    large = large_labels(base, settings, given, constant)
    for n in range(B):
        for i in range(L):
            total += term(
                base, settings, given, labels[n][i], logits[n][i], constant[n][i], n, i, (n, i) in large
            )
    if base == "crisp" and given.epoch >= settings.start_epoch:
        for i in range(L):
            mean = sum(sigmoid(row[i]) for row in logits) / B
            total += B * abs(mean - given.priors[i].item())
    return total / (B * L)


def large_labels(base, settings, given, logits):
    """Places of the largest losses among unknown labels that are not corrected yet (Kim et al., sec. 4)."""
    if not base.startswith("ll_") or given.epoch == 0:
        return set()
    share = settings.rate if base == "ll_cp" else given.epoch * settings.rate
    number = math.ceil(round(share * B * L, 6))
    losses = sorted(
        (
            (-math.log(1 - sigmoid(logits[n][i])), (n, i))
            for n in range(B)
            for i in range(L)
            if given.labels[n, i] == -1 and not (base == "ll_cp" and given.corrections[n, i])
        ),
        reverse=True,
    )
    return {place for _, place in losses[:number]}


def term(base, settings, given, label, z, z0, n, i, is_large):
    p, p0 = sigmoid(z), sigmoid(z0)
    positive, negative = -math.log(p), -math.log(1 - p)
    is_positive, is_unknown = label == 1, label == -1
    if base == "focal":
        gamma = settings.gamma
        return (1 - p) ** gamma * positive if is_positive else p**gamma * negative
    if base == "asl":
        if is_positive:
            return (1 - p) ** settings.gamma_positive * positive
        shifted = max(p - settings.margin, 0)
        return 0.0 if shifted == 0 else -(shifted**settings.gamma_negative) * math.log(1 - shifted)
    if base == "hill":
        if is_positive:
            q = sigmoid(z - settings.margin)
            return -((1 - q) ** settings.gamma) * math.log(q)
        return (settings.peak - p) * p**2 if is_unknown else negative
    if base == "splc":
        if is_positive:
            q = sigmoid(z - settings.margin)
            return -((1 - q) ** settings.gamma) * math.log(q)
        if is_unknown and given.epoch >= settings.start_epoch and p0 > settings.threshold:
            return (1 - p) ** settings.gamma * positive
        return p**settings.gamma * negative
    if not is_unknown and base != "crisp":
        return positive if is_positive else negative
    if base == "gr":
        at = lambda ends: ends[0] + (ends[1] - ends[0]) * given.progress  # noqa: E731
        k = sigmoid(at(settings.slope) * p0 + at(settings.intercept))
        v = math.exp(-((p0 - at(settings.center)) ** 2) / (2 * at(settings.width) ** 2))
        as_positive = (1 - p**settings.q_positive) / settings.q_positive
        as_negative = (1 - (1 - p) ** settings.q_negative) / settings.q_negative
        return v * (k * as_positive + (1 - k) * as_negative)
    if base == "ll_r":
        return 0.0 if is_large else negative
    if base == "ll_ct":
        return positive if is_large else negative
    if base == "ll_cp":
        return positive if is_large or given.corrections[n, i] else negative
    if base == "em_apl":
        s = given.scores[n, i].item()
        if s < given.cuts[i].item():
            return settings.beta * (s * positive + (1 - s) * negative)
        return settings.alpha * (p * math.log(p) + (1 - p) * math.log(1 - p))
    assert base == "crisp"
    if given.epoch < settings.start_epoch:
        return positive if is_positive else negative
    if is_positive:
        return 2 * given.priors[i].item() / given.given_share[i].item() * (1 - p)
    return 0.0 if is_unknown else negative


@pytest.mark.parametrize("defaults", [True, False], ids=["defaults", "others"])
@pytest.mark.parametrize("base", FIELD)
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), epoch=st.integers(0, 5))
def test_losses_equal_the_formulas_of_their_papers(base, defaults, seed, epoch):
    inputs, objective = random_inputs(seed, epoch), objective_of(base, defaults=defaults)
    values = objective(inputs).base
    assert values.shape == (B,)
    logits = inputs.logits.tolist()
    expected = reference(base, getattr(objective, section_of(base)), inputs, logits, logits)
    assert values.mean().item() == pytest.approx(expected, rel=1e-10, abs=1e-12)


@pytest.mark.parametrize("defaults", [True, False], ids=["defaults", "others"])
@pytest.mark.parametrize("epoch", [0, 4])
@pytest.mark.parametrize("base", FIELD)
def test_gradients_flow_through_the_formula_and_through_no_decision(base, epoch, defaults):
    """Masks, soft pseudo-labels, GR's weight, remembered scores and class means carry none."""
    inputs, objective = random_inputs(3, epoch), objective_of(base, defaults=defaults)
    (slope,) = torch.autograd.grad(objective(inputs).base.mean(), inputs.logits)
    chosen, here, step = getattr(objective, section_of(base)), inputs.logits.tolist(), 1e-6
    for n in range(B):
        for i in range(L):
            ends = []
            for change in (step, -step):
                moved = [list(row) for row in here]
                moved[n][i] += change
                ends.append(reference(base, chosen, inputs, moved, here))
            assert slope[n, i].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), rel=1e-5, abs=1e-9)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("defaults", [True, False], ids=["defaults", "others"])
@pytest.mark.parametrize("base", FIELD)
def test_losses_are_finite_and_exact_for_large_logits(base, defaults, dtype):
    inputs, objective = random_inputs(7, epoch=4), objective_of(base, defaults=defaults)
    row = torch.tensor([-100.0, 100.0, -20.0, 20.0, -1.0, 0.5])
    logits = row.repeat(B, 1).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        values = objective(replace(inputs, logits=logits)).base
    exact_logits = logits.detach().double().requires_grad_()
    exact = objective(replace(inputs, logits=exact_logits)).base
    torch.testing.assert_close(values.double(), exact, rtol=1e-5, atol=1e-6)
    (slope,) = torch.autograd.grad(values.sum(), logits)
    (exact_slope,) = torch.autograd.grad(exact.sum(), exact_logits)
    tolerance = 1e-4 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(slope.double(), exact_slope, rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("base", FIELD)
def test_a_batch_of_no_samples_has_no_values(base):
    inputs = random_inputs(8)
    empty = {name: getattr(inputs, name)[:0] for name in ("logits", "labels", "scores", "corrections")}
    loss = Objective(base=base, consistency="none")(replace(inputs, **empty))
    assert loss.total.shape == (0,)


# Ranks


def test_more_large_losses_than_unknown_labels_are_all_unknown_labels():
    inputs = random_inputs(10, epoch=9)
    loss = make_objective("ll_r", "none", large_loss={"rate": 1.0})(inputs).base
    bce = Objective(base="bce", consistency="none")(inputs).base
    torch.testing.assert_close(loss, bce)


def test_equal_losses_are_large_together():
    inputs = replace(random_inputs(11, epoch=1), labels=torch.full((B, L), -1, dtype=torch.int8))
    same = replace(inputs, logits=torch.zeros(B, L, dtype=torch.float64))
    assert not make_objective("ll_r", "none")(same).base.any()


# Settings


@pytest.mark.parametrize("base", FIELD)
def test_settings_of_another_loss_are_refused(base):
    for section, others in OTHERS.items():
        if section == section_of(base):
            assert getattr(make_objective(base, "none", **{section: others}), section) != getattr(
                Objective(), section
            )
        else:
            with pytest.raises(ConfigError, match=f"{section}: has no effect with base {base}"):
                make_objective(base, "none", **{section: others})


@pytest.mark.parametrize(
    ("base", "wrong", "path"),
    [
        ("focal", {"gamma": -1}, "focal.gamma"),
        ("asl", {"margin": 1.0}, "asl.margin"),
        ("hill", {"peak": 0.5}, "hill.peak"),
        ("splc", {"threshold": 1.5}, "splc.threshold"),
        ("gr", {"q_positive": 0}, "gr.q_positive"),
        ("gr", {"width": (1, 0)}, "gr.width"),
        ("ll_r", {"rate": 2}, "large_loss.rate"),
        ("em_apl", {"start_epoch": 0}, "em_apl.start_epoch"),
        ("crisp", {"delta": 0}, "crisp.delta"),
        ("crisp", {"prior": 0.1}, "crisp.prior"),
    ],
)
def test_settings_out_of_bounds_are_named(base, wrong, path):
    with pytest.raises(ConfigError, match=path.replace(".", r"\.")):
        make_objective(base, "none", **{section_of(base): wrong})


def test_an_unknown_section_is_named():
    with pytest.raises(ConfigError, match=r"objective\.hil: no such setting"):
        make_objective("hill", "none", hil={"margin": 1})


def test_numbers_of_large_losses_are_the_rate_rounded_up():
    assert [num_large(n, 0.002) for n in (1, 500, 501, 1000, 0)] == [1, 1, 2, 2, 0]
    assert num_large(10, 1.0) == 10
    for rate in np.linspace(0.001, 1, 200):
        number = num_large(640, rate)
        assert number - 1 < 640 * rate <= number + 1e-6


# Pages and configs


def test_the_page_of_losses_has_all_of_them_and_a_command_that_compares_them():
    page = (CONFIGS.parent / "docs" / "losses.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == sorted(BASES)
    (compared,) = re.findall(r"voc12_lite0_\{([\w,]+)\}\.yaml", page)
    assert set(FIELD) < set(compared.split(","))
    assert all((CONFIGS / f"voc12_lite0_{name}.yaml").exists() for name in compared.split(","))


@pytest.mark.parametrize("base", FIELD)
def test_configs_of_the_losses_differ_from_each_other_in_the_objective_only(base):
    """So that a study compares the losses."""
    config, baseline = (load_config(CONFIGS / f"voc12_lite0_{name}.yaml") for name in (base, "an"))
    assert config.objective == make_objective(base, "none")
    same = replace(config, run=baseline.run, objective=baseline.objective)
    assert same == baseline


# BoostLU: logits of the map, not of the pooled prediction


def boosted_inputs(seed, epoch, dtype=torch.float64):
    """Random inputs whose logits are the means of a random map, [B,L,3,3]."""
    generator = torch.Generator().manual_seed(seed)
    maps = 2 * torch.randn(B, L, 3, 3, generator=generator, dtype=dtype)
    maps.requires_grad_()
    return replace(random_inputs(seed, epoch), logits=maps.mean((2, 3)), logit_map=maps, corrections=None)


@pytest.mark.parametrize("scheme", ["reject", "correct"])
@pytest.mark.parametrize("values", [{}, {"alpha": 2.5, "rate": 0.11}], ids=["defaults", "others"])
@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 10_000), epoch=st.integers(0, 5))
def test_boostlu_is_the_large_loss_of_maps_with_boosted_positive_cells(scheme, values, seed, epoch):
    inputs = boosted_inputs(seed, epoch)
    objective = make_objective("boostlu", "none", boostlu={"scheme": scheme, **values})
    alpha, rate = values.get("alpha", 5.0), values.get("rate", 0.005)
    boosted = [
        [sum(alpha * cell if cell > 0 else cell for row in grid for cell in row) / 9 for grid in image]
        for image in inputs.logit_map.tolist()
    ]
    base = {"reject": "ll_r", "correct": "ll_ct"}[scheme]
    plain = make_objective(base, "none", large_loss={"rate": rate}).large_loss
    expected = reference(base, plain, inputs, boosted, boosted)
    assert objective(inputs).base.mean().item() == pytest.approx(expected, rel=1e-10, abs=1e-12)


def test_boostlu_multiplies_the_gradient_of_positive_cells():
    inputs = boosted_inputs(1, epoch=0)
    objective = make_objective("boostlu", "none", boostlu={"alpha": 3.0})
    (slope,) = torch.autograd.grad(objective(inputs).base.sum(), inputs.logit_map)
    positive = inputs.logit_map > 0
    for n in range(B):
        for i in range(L):
            cells = (slope[n, i] / torch.where(positive[n, i], 3.0, 1.0)).flatten()
            torch.testing.assert_close(cells, cells[:1].expand(9), rtol=1e-10, atol=1e-14)
            assert cells[0] != 0


@pytest.mark.parametrize("parts", [(2, 3), (5, 0)])
def test_boostlu_finds_large_losses_over_all_ranks(parts):
    inputs = boosted_inputs(2, epoch=3, dtype=torch.float32)
    objective = make_objective("boostlu", "none", boostlu={"rate": 0.1})
    whole = objective(inputs).base
    term, chosen = BASES["boostlu"], objective.boostlu
    rows = [slice(0, parts[0]), slice(parts[0], B)]
    ranks = [
        replace(inputs, **{name: getattr(inputs, name)[own] for name in ("logits", "labels", "logit_map")})
        for own in rows
    ]
    sent = []

    def batch(gather):
        return GlobalBatch(
            num_samples=B,
            num_classes=L,
            most_per_rank=B,
            world_size=2,
            epoch=3,
            device=torch.device("cpu"),
            sum=lambda tensor: tensor,
            gather=gather,
        )

    for own in [rank if len(rank.labels) else None for rank in ranks]:
        term.statistics(own, batch(lambda tensor: sent.append(tensor) or tensor), chosen)
    for own, rank in zip(rows, ranks, strict=True):
        found = term.statistics(rank, batch(lambda tensor: torch.cat(sent)), chosen)
        torch.testing.assert_close(objective(replace(rank, **found)).base, whole[own])


def test_boostlu_without_maps_says_that_they_are_missing():
    with pytest.raises(ValueError, match="logit_map: missing"):
        make_objective("boostlu", "none")(random_inputs(0))
