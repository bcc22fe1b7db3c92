"""LAMB against its formula and timm's, and the groups of parameters by weight decay and depth."""

import copy

import numpy as np
import pytest
import torch

from bigscl.config import ConfigError
from bigscl.config.schema import OptimizerConfig
from bigscl.models.spatial import build_model
from bigscl.training.checkpoint_folder import misfit
from bigscl.training.model_state import Lamb, make_optimizer, parameter_groups, set_learning_rate
from tests.builders import config_of

SHAPES = [(5, 3), (4,), (2, 3, 2, 2)]
STEPS = 6


def gradients(shape, generator):
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(STEPS)]


def drawn():
    generator = torch.Generator().manual_seed(3)
    starts = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in SHAPES]
    return starts, [gradients(shape, generator) for shape in SHAPES]


def by_formula(start, gradients, rates, decay, eps=1e-6):
    """Algorithm 2 of You et al. 2020, one tensor at a time; plain Adam without weight decay."""
    x = start.numpy().copy()
    m, v = np.zeros_like(x), np.zeros_like(x)
    for t, (g, rate) in enumerate(zip(gradients, rates, strict=True), 1):
        g = g.numpy()
        m = 0.9 * m + 0.1 * g
        v = 0.999 * v + 0.001 * g**2
        update = (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + eps)
        trust = 1.0
        if decay:
            update = update + decay * x
            trust = np.sqrt((x**2).sum()) / np.sqrt((update**2).sum())
        x = x - rate * trust * update
    return torch.from_numpy(x)


def trained(make, starts, all_gradients, rates, *, restart_at=None):
    parameters = [torch.nn.Parameter(start.clone()) for start in starts]
    optimizer = make(parameters)
    for step, rate in enumerate(rates):
        if step == restart_at:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = make(parameters)
            optimizer.load_state_dict(saved)
        for parameter, own in zip(parameters, all_gradients, strict=True):
            parameter.grad = own[step].clone()
        set_learning_rate(optimizer.param_groups, rate)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


RATES = [0.01, 0.02, 0.03, 0.02, 0.01, 0.005]


def groups(parameters):
    return [{"params": parameters[:1] + parameters[2:]}, {"params": parameters[1:2], "weight_decay": 0.0}]


@pytest.mark.parametrize("decay", [0.0, 0.02])
def test_lamb_is_its_formula(decay):
    starts, own = drawn()
    found = trained(lambda parameters: Lamb(parameters, weight_decay=decay), starts, own, RATES)
    for start, gradient, end in zip(starts, own, found, strict=True):
        torch.testing.assert_close(end, by_formula(start, gradient, RATES, decay))


def test_lamb_leaves_tensors_of_zeros_a_finite_step():
    start, gradient = [torch.zeros(3, dtype=torch.float64)], [[torch.ones(3, dtype=torch.float64)]]
    (found,) = trained(lambda parameters: Lamb(parameters, weight_decay=0.1), start, gradient, [0.01])
    torch.testing.assert_close(found, torch.full((3,), -0.01, dtype=torch.float64), rtol=1e-5, atol=0)


def test_lamb_restarts_from_its_saved_state_bit_for_bit():
    starts, own = drawn()

    def make(parameters):
        return Lamb(groups(parameters), weight_decay=0.02)

    whole = trained(make, starts, own, RATES)
    restarted = trained(make, starts, own, RATES, restart_at=3)
    assert all(torch.equal(a, b) for a, b in zip(whole, restarted, strict=True))


def settings(**given):
    return OptimizerConfig(**given)


def test_by_default_all_that_trains_is_one_group_in_the_order_of_the_network():
    network = build_model("resnet18", 4)
    (group,) = parameter_groups(settings(), network)
    assert list(map(id, group["params"])) == list(map(id, network.parameters()))
    assert group.keys() == {"params"}
    network.freeze_backbone()
    (group,) = parameter_groups(settings(), network)
    assert list(map(id, group["params"])) == list(map(id, network.head_parameters()))


@pytest.mark.parametrize(
    "backbone", ["resnet18", "timm:vit_tiny_patch16_224", "bigscl.models.smallnet:small_resnet"]
)
def test_norms_and_biases_have_no_weight_decay_if_the_config_says_so(backbone):
    if backbone.startswith("timm"):
        pytest.importorskip("timm")
    args = {"global_pool": "avg"} if "vit" in backbone else None
    network = build_model(backbone, 4, args=args)
    chosen = settings(name="adamw", weight_decay=0.1, decay_norms_and_biases=False)
    optimizer = make_optimizer(chosen, network)
    names = {id(parameter): name for name, parameter in network.named_parameters()}
    decays = {
        names[id(each)]: group["weight_decay"] for group in optimizer.param_groups for each in group["params"]
    }
    assert decays.keys() == set(names.values())
    norms = {
        f"{name}.{inner}"
        for name, module in network.named_modules()
        if "norm" in type(module).__name__.lower()
        for inner, _ in module.named_parameters(recurse=False)
    }
    biases = {name for name in decays if name.endswith("bias")}
    assert norms
    assert biases
    assert {name for name, decay in decays.items() if decay == 0} == norms | biases
    assert set(decays.values()) == {0.0, 0.1}


def factors(network, decay):
    optimizer = make_optimizer(settings(layer_decay=decay), network)
    set_learning_rate(optimizer.param_groups, 2.0)
    names = {id(parameter): name for name, parameter in network.network.named_parameters()}
    return {names[id(each)]: group["lr"] / 2 for group in optimizer.param_groups for each in group["params"]}


def test_layers_decay_from_the_head_to_the_image():
    found = factors(build_model("resnet18", 4), 0.5)
    assert found["fc.weight"] == 1
    stages = [found[f"layer{number}.0.conv1.weight"] for number in (4, 3, 2, 1)]
    assert stages == [0.5, 0.25, 0.125, 0.0625]
    assert found["conv1.weight"] == found["bn1.bias"] == 0.5**5


def test_layers_of_a_transformer_are_its_blocks_and_its_embedding_is_the_first():
    pytest.importorskip("timm")
    network = build_model("timm:vit_tiny_patch16_224", 4, args={"global_pool": "avg"})
    found = factors(network, 0.9)
    blocks = [found[f"blocks.{number}.attn.qkv.weight"] for number in range(12)]
    assert blocks == sorted(blocks)
    assert len(set(blocks)) == 12
    assert found["head.weight"] == 1
    assert found["pos_embed"] == min(found.values()) == pytest.approx(found["patch_embed.proj.weight"])


def test_the_rate_of_a_network_without_layer_decay_is_that_of_the_schedule():
    optimizer = make_optimizer(settings(), build_model("resnet18", 4))
    set_learning_rate(optimizer.param_groups, 0.3)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3]


def test_a_state_of_other_groups_or_of_adam_does_not_fit():
    network = build_model("resnet18", 4)

    def state(**given):
        return make_optimizer(settings(weight_decay=0.1, **given), network)

    one, two = state(name="lamb"), state(name="lamb", decay_norms_and_biases=False)
    reason = misfit(one.state_dict(), two.state_dict(), two.param_groups)
    assert reason is not None
    assert "its 1 groups of parameters have [62] of them, expected [21, 41]" in reason
    reason = misfit(state(name="adam").state_dict(), one.state_dict(), one.param_groups)
    assert reason == "it is the state of another optimizer"


def refused(**optimizer):
    with pytest.raises(ConfigError) as raised:
        config_of(optimizer=optimizer)
    return str(raised.value)


def test_settings_of_the_optimizer_without_effect_are_refused():
    assert "optimizer.fused: has no effect with optimizer.name sgd" in refused(name="sgd", fused=True)
    assert "optimizer.decay_norms_and_biases: false has no effect" in refused(decay_norms_and_biases=False)
    with pytest.raises(ValueError, match=r"optimizer.fused: needs a GPU, this run is on cpu"):
        make_optimizer(settings(fused=True), build_model("resnet18", 4))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_fused_adam_is_adam():
    network = build_model("resnet18", 4).cuda()
    assert make_optimizer(settings(fused=True), network).param_groups[0]["fused"]
