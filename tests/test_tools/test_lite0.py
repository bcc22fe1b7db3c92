"""The example of one's own network: as published, and able to be frozen in part."""

import torch
from efficientnet_lite_pytorch import EfficientNet

from bigscl.models import lite0
from bigscl.models.spatial import build_model


def images(side):
    return torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0)) * 2 - 1


def test_padding_within_convolutions_changes_nothing():
    published = torch.load(lite0.imagenet_weights(), weights_only=True)
    original = EfficientNet.from_name("efficientnet-lite0", num_classes=1000)
    original.load_state_dict(published)
    ours = lite0.efficientnet_lite0(1000)
    ours.load_state_dict(published)
    with torch.no_grad():
        for side in (160, 224):
            expected = original.eval()(images(side))
            torch.testing.assert_close(ours.eval()(images(side)), expected, rtol=1e-5, atol=1e-5)


def test_pretrained_has_the_published_weights_under_a_fresh_head():
    published = torch.load(lite0.imagenet_weights(), weights_only=True)
    state = lite0.pretrained(20).state_dict()
    assert state.keys() == published.keys()
    for name, value in state.items():
        if name.startswith(lite0.HEAD):
            assert len(value) == 20
        else:
            assert torch.equal(value, published[name])


def test_its_early_blocks_can_be_frozen():
    model = build_model("bigscl.models.lite0:pretrained", 20)
    assert len(model.stages) == 18
    model.freeze_stages(12)
    model.train()
    network = model.network
    before = {name: value.clone() for name, value in network.state_dict().items()}
    model(images(64)).logits.sum().backward()
    frozen = [network._conv_stem, network._bn0, *network._blocks[:11]]
    assert all(parameter.grad is None for module in frozen for parameter in module.parameters())
    trained = [*network._blocks[11:], network._conv_head, network._bn1, network._fc]
    assert all(parameter.grad is not None for module in trained for parameter in module.parameters())
    changed = {name for name, value in network.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert all(
        name.startswith(("_blocks.11", "_blocks.12", "_blocks.13", "_blocks.14", "_blocks.15", "_bn1"))
        for name in changed
    )


def test_under_autocast_the_trained_depthwise_convolutions_stay_in_float32():
    model = build_model("bigscl.models.lite0:pretrained", 20)
    model.freeze_stages(12)
    model.train()
    kinds = {}
    for index, block in enumerate(model.network._blocks):
        block._depthwise_conv.register_forward_hook(
            lambda _, inputs, output, index=index: kinds.__setitem__(index, output.dtype)
        )
    with torch.autocast("cpu", torch.bfloat16):
        model(images(64)).logits.sum().backward()
    assert {index for index, kind in kinds.items() if kind == torch.float32} == {11, 12, 13, 14, 15}
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        model(images(64))
    assert set(kinds.values()) == {torch.bfloat16}
