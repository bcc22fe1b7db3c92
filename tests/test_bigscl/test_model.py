"""The spatial head on many networks: same logits as the network itself, and its own state dict back."""

import copy
import logging
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torchvision import models

from bigscl.common.failures import explain
from bigscl.models import lite0
from bigscl.models.families import create_network
from bigscl.models.spatial import build_model, pool
from bigscl.training.checkpoint_folder import write_tensors

FITTING = [
    "resnet18",
    "resnext50_32x4d",
    "regnet_y_400mf",
    "efficientnet_b0",
    "mobilenet_v2",
    "convnext_tiny",
    "densenet121",
    "shufflenet_v2_x0_5",
    "mnasnet0_5",
    "googlenet",
    "swin_t",
    "timm:resnet18",
    "timm:convnext_atto",
    "timm:efficientnet_lite0",
]
PLAIN_OPTIONS = {"googlenet": {"aux_logits": False, "init_weights": False}}


class Digits(nn.Module):
    """A user's own network: pooling by `mean`, two dropouts, names of its own."""

    def __init__(self, num_classes):
        super().__init__()
        self.trunk = nn.Sequential(
            nn.Sequential(nn.Conv2d(3, 4, 3, stride=4, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            nn.Sequential(nn.Conv2d(4, 8, 3, stride=4, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
            nn.Dropout2d(0.5),
        )
        self.drop = nn.Dropout(0.5)
        self.scores = nn.Linear(8, num_classes)

    def forward(self, images):
        return self.scores(self.drop(self.trunk(images).mean((2, 3))))


class Tuples(Digits):
    """A network of two outputs."""

    def forward(self, images):
        return super().forward(images), images


def not_a_network(num_classes):
    return num_classes


DIGITS = "tests.test_bigscl.test_model:Digits"


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


def images(batch=2, height=96, width=128):
    return torch.rand(batch, 3, height, width)


def plain_network(backbone, num_classes):
    """The library's own network, made without us."""
    if backbone.startswith("timm:"):
        import timm

        return timm.create_model(backbone.removeprefix("timm:"), num_classes=num_classes)
    return models.get_model(backbone, num_classes=num_classes, **PLAIN_OPTIONS.get(backbone, {}))


def settle_batch_norm(network):
    """Statistics under which an untrained network neither vanishes nor explodes in eval mode."""
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.momentum = None
    if norms:
        with torch.no_grad():
            network.train()(images(4))
    network.eval()


@pytest.mark.parametrize("backbone", FITTING)
def test_pooled_map_and_export_give_the_logits_of_the_network(backbone):
    model = build_model(backbone, 7)
    settle_batch_norm(model)
    plain = plain_network(backbone, 7).eval()
    plain.load_state_dict(model.network.state_dict(), strict=True)
    batch = images()
    with torch.no_grad():
        expected = plain(batch)
        torch.testing.assert_close(model(batch).logits, expected, rtol=0, atol=0)
        logit_map, logits = model(batch, maps=True)
    assert logit_map.shape[:2] == (2, 7)
    assert logit_map.shape[2] < logit_map.shape[3], "a wide image has a wide map"
    assert logit_map.std((2, 3)).min() > 0
    scale = expected.abs().max().item()
    torch.testing.assert_close(logit_map.mean((2, 3)), expected, rtol=0, atol=1e-5 * max(scale, 1))
    torch.testing.assert_close(logits, expected, rtol=0, atol=0)


SMALL_VIT = {"img_size": 64, "embed_dim": 24, "depth": 2, "num_heads": 2, "global_pool": "avg"}
SMALL_SWIN = {"img_size": 64, "window_size": 2, "embed_dim": 12, "depths": (1, 1), "num_heads": (2, 2)}


@pytest.mark.parametrize(
    ("backbone", "args", "side", "layout", "prefix"),
    [
        ("timm:vit_tiny_patch16_224", SMALL_VIT, 4, "tokens", 1),
        ("timm:vit_tiny_patch16_224", {**SMALL_VIT, "reg_tokens": 3}, 4, "tokens", 4),
        ("timm:vit_tiny_patch16_224", {**SMALL_VIT, "class_token": False}, 4, "tokens", 0),
        ("timm:swin_tiny_patch4_window7_224", SMALL_SWIN, 8, "channels last", 0),
    ],
)
def test_networks_that_average_tokens_give_maps(backbone, args, side, layout, prefix):
    import timm

    model = build_model(backbone, 7, args=args).eval()
    assert (model.head.layout, model.head.prefix) == (layout, prefix)
    assert model.head.side_of_images == 64, "these take no other size"
    plain = timm.create_model(backbone.removeprefix("timm:"), num_classes=7, **args).eval()
    plain.load_state_dict(model.network.state_dict(), strict=True)
    batch = images(2, 64, 64)
    with torch.no_grad():
        expected = plain(batch)
        logit_map, logits = model(batch, maps=True)
    assert logit_map.shape == (2, 7, side, side)
    assert torch.equal(logits, expected)
    assert logit_map.std((2, 3)).min() > 0
    torch.testing.assert_close(logit_map.mean((2, 3)), expected, rtol=0, atol=1e-5)
    with pytest.raises(
        ValueError, match=r"data.size: 96, but the network takes images of 64 x 64.*img_size: 96"
    ):
        model.check_side(96, "data.size")


class Patches(nn.Module):
    """Tokens that see their own patch only, after two others: a map shows where in the image each is."""

    def __init__(self, num_classes, width=8):
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.norm = nn.LayerNorm(width)
        self.scores = nn.Linear(width, num_classes)

    def forward(self, images):
        tokens = self.patches(images).flatten(2).transpose(1, 2)
        tokens = self.norm(torch.cat([torch.ones_like(tokens[:, :2]), tokens], 1))
        return self.scores(tokens[:, 2:].mean(1))


def test_tokens_return_to_their_place_in_the_image():
    model = build_model("tests.test_bigscl.test_model:Patches", 3, args={"width": 6}).eval()
    assert model.network.scores.in_features == 6
    dark, lit = images(1, 96, 128), images(1, 96, 128)
    lit[:] = dark
    lit[:, :, 32:48, 80:96] += 1
    with torch.no_grad():
        changed = (model.maps(lit) - model.maps(dark)).abs().amax((0, 1))
    assert changed.shape == (6, 8)
    assert changed.nonzero().tolist() == [[2, 5]]


@pytest.mark.parametrize("backbone", ["resnet18", "timm:convnext_atto", "densenet121"])
def test_gradients_through_the_map_equal_those_of_the_network(backbone):
    model = build_model(backbone, 5)
    settle_batch_norm(model)
    model.double()
    batch = images().double()
    gradients = []
    for logits in (lambda: model(batch).logits, lambda: pool(model.maps(batch))):
        model.zero_grad()
        logits().square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for pooled, spatial in zip(*gradients, strict=True):
        torch.testing.assert_close(spatial, pooled, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize(
    ("backbone", "reason"),
    [
        ("vgg11", "last layer 'classifier.6' is not the average of a feature map"),
        ("alexnet", "is not the average of a feature map but comes from a hidden layer"),
        ("mobilenet_v3_small", r"a hidden layer \('classifier.0'\)"),
        ("squeezenet1_0", "does not end in a linear layer"),
        ("vit_b_16", "is not the average of a feature map but a class token"),
    ],
)
def test_networks_whose_head_does_not_allow_maps_are_refused_with_the_reason(backbone, reason):
    with pytest.raises(ValueError, match=reason) as raised:
        build_model(backbone, 3)
    assert "ResNet" in str(raised.value), "says which networks do"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"backbone": "resnet51"}, "torchvision has no classification network 'resnet51'"),
        ({"backbone": "timm:resnet51x"}, "timm has no network 'resnet51x'"),
        ({"backbone": "no.such:thing"}, "cannot import 'no.such:thing'"),
        ({"backbone": "math:pi"}, "math:pi is float, expected a callable"),
        ({"backbone": "tests.test_bigscl.test_model:not_a_network"}, "returned int"),
        ({"backbone": "tests.test_bigscl.test_model:Tuples"}, "gave .* for an image, expected finite logits"),
        ({"weights": "IMAGENET22K"}, r"resnet18 has no weights 'IMAGENET22K'.*IMAGENET1K_V1"),
        ({"backbone": DIGITS, "weights": "DEFAULT"}, "expected a file"),
        ({"backbone": "timm:resnet18", "weights": "IMAGENET1K_V1"}, "expected DEFAULT or a file"),
        ({"args": {"num_classes": 4}}, "model.args: num_classes: the data and model.weights decide that"),
        ({"args": {"widht": 4}}, "model.args: resnet18 takes no 'widht'"),
        ({"backbone": "timm:resnet18", "args": {"bogus": 1}}, "model.args: timm:resnet18 takes no 'bogus'"),
        ({"backbone": DIGITS, "args": {"bogus": 1}}, "takes no 'bogus'"),
        ({"backbone": "timm:resnet18", "args": {"global_pool": "max"}}, "feature map but its maximum"),
        ({"num_classes": 0}, "num_classes: found 0"),
    ],
)
def test_wrong_requests_say_what_was_found_and_expected(options, message):
    with pytest.raises(ValueError, match=message):
        build_model(**{"backbone": "resnet18", "num_classes": 3, **options})


def test_real_pretrained_network_keeps_its_logits_and_exports():
    weights = lite0.imagenet_weights()
    original = lite0.efficientnet_lite0(1000).eval()
    original.load_state_dict(torch.load(weights, weights_only=True))
    model = build_model("bigscl.models.lite0:efficientnet_lite0", 1000, weights=weights).eval()
    batch = 2 * images(2, 224, 224) - 1
    with torch.no_grad():
        expected = original(batch)
        assert torch.equal(model(batch).logits, expected)
        logit_map = model.maps(batch)
        assert logit_map.shape == (2, 1000, 7, 7)
        torch.testing.assert_close(logit_map.mean((2, 3)), expected, rtol=0, atol=1e-5)
        again = lite0.efficientnet_lite0(1000).eval()
        again.load_state_dict(model.network.state_dict(), strict=True)
        torch.testing.assert_close(again(batch), expected, rtol=0, atol=1e-5)


def test_published_weights_come_by_name(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    # Where torch.hub keeps downloads: a file that is there is not downloaded.
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    published = models.ResNet18_Weights.IMAGENET1K_V1
    folder = tmp_path / "hub" / "checkpoints"
    folder.mkdir(parents=True)
    state = models.resnet18().state_dict()
    torch.save(state, folder / published.url.rsplit("/", 1)[1])
    model = build_model("resnet18", 1000, weights="IMAGENET1K_V1")
    assert all(torch.equal(value, state[name]) for name, value in model.network.state_dict().items())
    assert "freshly initialised" not in caplog.text
    model = build_model("resnet18", 20, weights="DEFAULT")
    assert model.network.fc.weight.shape == (20, 512)
    assert "head fc has 1000 classes, not 20: freshly initialised" in caplog.text
    models.resnet18(num_classes=20).load_state_dict(model.network.state_dict(), strict=True)


@pytest.mark.parametrize("backbone", ["googlenet", "inception_v3"])
def test_published_networks_lose_their_auxiliary_classifiers(tmp_path, monkeypatch, backbone):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    file = models.get_model_weights(backbone).DEFAULT.url.rsplit("/", 1)[1]
    (tmp_path / "hub" / "checkpoints").mkdir(parents=True)
    state = models.get_model(backbone, init_weights=False, aux_logits=True).state_dict()
    torch.save(state, tmp_path / "hub" / "checkpoints" / file)
    model = build_model(backbone, 3, weights="DEFAULT").train()
    assert model.network.transform_input, "as the published weights want it"
    model(images(2)).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("name", ["weights.pt", "wrapped.pth", "weights.safetensors"])
def test_weights_come_from_files(tmp_path, name):
    file = str(tmp_path / name)
    state = build_model(DIGITS, 4).network.state_dict()
    if name.endswith("safetensors"):
        save_file(state, file)
    else:
        torch.save({"model": state, "epoch": 3} if "wrapped" in name else state, file)
    loaded = build_model(DIGITS, 4, weights=file).network.state_dict()
    assert loaded.keys() == state.keys()
    assert all(torch.equal(loaded[key], state[key]) for key in state)


def test_weights_of_another_network_are_refused(tmp_path):
    file = str(tmp_path / "weights.pt")
    torch.save(models.resnet18(num_classes=4).state_dict(), file)
    with pytest.raises(
        ValueError, match=r"does not fit Digits.*Only the head \(scores\) may differ"
    ) as raised:
        build_model(DIGITS, 4, weights=file)
    assert "16 missing (trunk.0.0.weight, trunk.0.0.bias, trunk.0.1.weight, ...)" in str(raised.value)
    assert "122 unexpected (conv1.weight, bn1.weight" in str(raised.value)
    with pytest.raises(ValueError, match=r"1 of another shape \(conv1.weight\)"):
        build_model("resnet18", 4, weights=str(_save_with_other_stem(tmp_path)))


def _save_with_other_stem(folder):
    state = models.resnet18(num_classes=4).state_dict()
    state["conv1.weight"] = torch.zeros(64, 1, 7, 7)
    torch.save(state, folder / "grey.pt")
    return folder / "grey.pt"


def test_files_that_hold_no_weights_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no file .*missing\.pt"):
        build_model(DIGITS, 4, weights=str(tmp_path / "missing.pt"))
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match="holds no state dict"):
        build_model(DIGITS, 4, weights=str(tmp_path / "list.pt"))


def test_maps_come_in_training_and_on_request_only():
    model = build_model(DIGITS, 4)
    assert model.train()(images()).logit_map.shape == (2, 4, 6, 8)
    assert model(images(), maps=False).logit_map is None
    assert model.eval()(images()).logit_map is None
    assert model.maps(images()).shape == (2, 4, 6, 8)


def test_dropout_drops_whole_channels_of_the_map():
    model = build_model(DIGITS, 4).eval()
    batch = images(1)
    # A head that passes channels through shows which were dropped: all cells or none, the rest doubled.
    model.network.scores = nn.Linear(8, 8)
    with torch.no_grad():
        model.network.scores.weight.copy_(torch.eye(8))
        model.network.scores.bias.zero_()
        kept = model.maps(batch)
        model.training = True
        cells = torch.cat([model.maps(batch) for _ in range(50)])
    dropped = (cells == 0).flatten(2).all(2)
    alive = (kept != 0).any((2, 3))[0]
    assert 0.3 < dropped[:, alive].float().mean() < 0.7
    expected = torch.where(dropped[:, :, None, None], 0, 2 * kept)
    torch.testing.assert_close(cells, expected)


def test_head_and_backbone_parameters_are_all_parameters_once():
    model = build_model("resnet18", 4)
    parts = [*model.head_parameters(), *model.backbone_parameters()]
    assert {id(part) for part in parts} == {id(parameter) for parameter in model.parameters()}
    assert len(parts) == len(list(model.parameters()))
    assert [tuple(part.shape) for part in model.head_parameters()] == [(4, 512), (4,)]


def test_state_dict_has_the_network_s_own_names():
    names = build_model("resnet18", 4).state_dict().keys()
    assert names == {f"network.{name}" for name in models.resnet18(num_classes=4).state_dict()}


def train_step(model):
    model.zero_grad()
    model(images(4)).logits.square().sum().backward()


def test_frozen_backbone_stays_in_eval_mode_and_gets_no_gradient():
    model = build_model("efficientnet_b0", 4)
    model.freeze_backbone()
    model.train()
    before = copy.deepcopy(model.state_dict())
    train_step(model)
    assert all(parameter.grad is not None for parameter in model.head_parameters())
    assert all(parameter.grad is None for parameter in model.backbone_parameters())
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before), "batch norm did not move"
    assert model.network.classifier[0].training, "the head's dropout trains"
    model.freeze_backbone(False)
    train_step(model)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not torch.equal(
        before["network.features.0.1.running_mean"], model.network.features[0][1].running_mean
    )


def test_nothing_is_recorded_for_backward_in_a_frozen_backbone():
    model = build_model("resnet18", 4)
    model.freeze_backbone()
    seen = []
    model.network.layer4.register_forward_hook(lambda module, args, output: seen.append(output.requires_grad))
    train_step(model)
    assert seen == [False]


def test_frozen_stages_keep_still_while_the_others_train():
    model = build_model("resnet18", 4)
    assert [stage[0] for stage in model.stages[1:]] == [
        getattr(model.network, f"layer{i}") for i in range(1, 5)
    ]
    assert model.stages[0] == [model.network.conv1, model.network.bn1]
    model.freeze_stages(3)
    model.train()
    train_step(model)
    moved = {name for name, parameter in model.network.named_parameters() if parameter.grad is not None}
    assert {name.split(".")[0] for name in moved} == {"layer3", "layer4", "fc"}
    assert not model.network.layer2.training
    assert model.network.layer3.training
    assert model.network.bn1.num_batches_tracked == 0
    model.freeze_stages(0)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert model.network.bn1.training
    with pytest.raises(ValueError, match="freeze_stages: found 6, this network has 5 stages"):
        model.freeze_stages(6)


@pytest.mark.parametrize("backbone", ["resnet18", "timm:efficientnet_b0"])
def test_frozen_statistics_keep_still_while_their_layers_train(backbone):
    model = build_model(backbone, 4)
    model.freeze_statistics()
    model.train()
    before = {name: value.clone() for name, value in model.network.named_buffers()}
    train_step(model)
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.network.named_buffers())
    assert all(module.training for module in model.network.modules() if isinstance(module, nn.Conv2d))
    model.freeze_statistics(False)
    train_step(model)
    assert not torch.equal(model.get_buffer("network.bn1.running_mean"), before["bn1.running_mean"])


def test_a_network_without_batch_normalisation_has_no_statistics_to_freeze():
    with pytest.raises(ValueError, match="freeze_statistics: this network has no batch normalisation"):
        build_model("convnext_tiny", 4).freeze_statistics()


@pytest.mark.parametrize("backbone", FITTING)
def test_stages_cover_the_backbone_in_order(backbone):
    model = build_model(backbone, 3)
    staged = [id(p) for stage in model.stages for module in stage for p in module.parameters()]
    backbone_parameters = [id(parameter) for parameter in model.backbone_parameters()]
    if model.head.norm is not None:
        norm = {id(parameter) for parameter in model.network.get_submodule(model.head.norm).parameters()}
        backbone_parameters = [parameter for parameter in backbone_parameters if parameter not in norm]
    assert staged == backbone_parameters
    assert len(model.stages) >= 5


def test_channels_last_gives_the_same_maps_and_a_checkpoint_that_the_plain_network_loads(tmp_path):
    model = build_model("resnet18", 4).eval()
    batch = images()
    expected = model.maps(batch)
    model = model.to(memory_format=torch.channels_last)
    maps = model.maps(batch.to(memory_format=torch.channels_last))
    torch.testing.assert_close(maps, expected, rtol=1e-4, atol=1e-4)
    with (tmp_path / "model.safetensors").open("wb") as file:
        write_tensors(model.network.state_dict())(file)
    plain = models.resnet18(num_classes=4).eval()
    plain.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=True)
    torch.testing.assert_close(plain(batch), expected.mean((2, 3)), rtol=1e-4, atol=1e-4)


@pytest.mark.skipif(torch.__version__.startswith("2.4."), reason="2.4 breaks the graph at get_submodule")
def test_torch_compile_captures_the_whole_training_forward():
    model = build_model(DIGITS, 4).train()
    batch = images()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.manual_seed(1)
    expected = model(batch)
    torch.manual_seed(1)
    logit_map, logits = compiled(batch)
    torch.testing.assert_close(logit_map, expected.logit_map)
    torch.testing.assert_close(logits, expected.logits)


def test_weights_that_cannot_be_downloaded_are_one_line_with_address_and_place(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    # urllib keeps the proxies that it found first, for this test and for all after it.
    monkeypatch.setattr("urllib.request._opener", None)
    with pytest.raises(ValueError, match="cannot be downloaded") as caught:
        create_network("resnet18", 3, "IMAGENET1K_V1")
    message = str(caught.value)
    assert "https://download.pytorch.org/models/resnet18-f37072fd.pth" in message
    assert str(tmp_path / "hub" / "checkpoints" / "resnet18-f37072fd.pth") in message
    assert "or give a file of weights (.pt, .pth, .safetensors)" in message
    assert "\n" not in message
    assert explain(caught.value) == message


def test_weights_of_timm_that_cannot_be_downloaded_say_so_too(monkeypatch):
    timm = pytest.importorskip("timm")

    def create_model(*_, **__):
        raise ConnectionError("[Errno 101] Network is unreachable")

    monkeypatch.setattr(timm, "create_model", create_model)
    with pytest.raises(ValueError, match=r"https://huggingface\.co/timm/resnet18\S+ \(ConnectionError"):
        create_network("timm:resnet18", 3, "DEFAULT")


def test_a_network_is_imported_from_the_current_folder_as_by_python_m(tmp_path, monkeypatch):
    """The path of the `bigscl` command starts with the folder of the command."""
    (tmp_path / "net_of_mine.py").write_text("from torchvision.models import resnet18 as Net")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", [path for path in sys.path if path])
    assert create_network("net_of_mine:Net", 3).fc.out_features == 3
