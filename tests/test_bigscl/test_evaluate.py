"""Evaluation from whatever names a network, on one process; mistakes end in one line and exit code 2."""

import json
import logging
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torchvision import models
from torchvision.transforms.functional import to_pil_image

from bigscl.config import load_config, make_config, to_yaml
from bigscl.data.build_index import scan
from bigscl.data.loader import Loader
from bigscl.data.read_samples import read_images
from bigscl.data.transforms import EvaluationTransform
from bigscl.evaluate import main
from bigscl.evaluation.evaluate_options import EvaluationOptions
from bigscl.evaluation.predictions import load_predictions
from bigscl.evaluation.target import find_target, find_weights, with_overrides
from bigscl.models.spatial import build_model
from bigscl.store import HeatmapStore
from tests.builders import classed, labelled, write_tar

BACKBONE = "bigscl.models.smallnet:small_resnet"
NUM_IMAGES, NUM_CLASSES = 11, 3


@pytest.fixture(autouse=True)
def same_process_afterwards():
    """`main` is made for a process of its own: it sets up logging and the number of threads."""
    root, threads = logging.getLogger(), torch.get_num_threads()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    torch.set_num_threads(threads)


def weights(seed):
    torch.manual_seed(seed)
    return build_model(BACKBONE, NUM_CLASSES).network.state_dict()


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run as training leaves it: config, best weights, two checkpoints, a store; and its shards."""
    folder = tmp_path_factory.mktemp("evaluate")
    for part in ("train", "val"):
        random = np.random.default_rng(len(part))
        members = []
        for number in range(1, NUM_IMAGES + 1):
            own = np.flatnonzero(random.random(NUM_CLASSES) < 0.5).tolist() or [number % NUM_CLASSES]
            boxes = [[label, 0.1, 0.2, 0.7, 0.8] for label in own]
            key = f"ILSVRC2012_val_{number:08d}"
            members += labelled(key, number, full=own, given=own[:1], boxes=boxes)
        write_tar(folder / f"{part}-0.tar", members)
        scan(str(folder / f"{part}-0.tar"), num_classes=NUM_CLASSES)[0].save(folder / f"{part}.npz")
    run = folder / "run"
    data = {"train": str(folder / "train-0.tar"), "train_index": str(folder / "train.npz")}
    data |= {"val": str(folder / "val-0.tar"), "val_index": str(folder / "val.npz")}
    data |= {"size": 48, "resize": "square", "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.3, 0.4]}
    config = make_config({"run": str(run), "data": data, "model": {"backbone": BACKBONE}})
    for place, seed in {"best": 0, "checkpoints/step-00000005": 1, "checkpoints/step-00000010": 2}.items():
        (run / place).mkdir(parents=True)
        save_file(weights(seed), run / place / "model.safetensors")
    (run / "config.yaml").write_text(to_yaml(config))
    index = scan(config.data.train, num_classes=NUM_CLASSES)[0]
    HeatmapStore.create(run / "store", index.annotations(), heatmap_size=12)
    return folder


def logits_of(folder, seed):
    """What the network of a seed says of the validation images, one at a time."""
    model = build_model(BACKBONE, NUM_CLASSES).eval()
    model.network.load_state_dict(weights(seed))
    index = scan(str(folder / "val-0.tar"), num_classes=NUM_CLASSES)[0]
    mean, std = torch.tensor([0.4, 0.5, 0.6])[:, None, None], torch.tensor([0.2, 0.3, 0.4])[:, None, None]
    found = []
    for image in read_images(index, index.ids()).values():
        pixels = EvaluationTransform(size=48, resize="square")(image, 0).pixels
        with torch.no_grad():
            found.append(model.network(((pixels / 255 - mean) / std)[None])[0])
    return torch.stack(found)


def evaluated(*arguments, output):
    assert main([*map(str, arguments), "--workers", "0", "-o", str(output)]) == 0
    return load_predictions(output), json.loads((output / "report.json").read_text())


@pytest.mark.parametrize(
    ("place", "seed"),
    [("run", 0), ("run/best", 0), ("run/best/model.safetensors", 0), ("run/checkpoints/step-00000005", 1)],
)
def test_a_run_a_checkpoint_or_its_file_is_evaluated_as_it_was_trained(made, tmp_path, place, seed):
    saved, report = evaluated(made / place, output=tmp_path)
    expected = logits_of(made, seed)
    assert torch.allclose(torch.from_numpy(saved.logits).float(), expected, rtol=2e-3, atol=2e-3)
    assert saved.keys[0] == "ILSVRC2012_val_00000001"
    assert report["num_images"] == NUM_IMAGES
    assert report["model"] == ("run/best" if seed == 0 else place)


def test_a_run_without_best_weights_means_its_newest_checkpoint(made, tmp_path):
    shutil.copytree(made / "run" / "checkpoints", tmp_path / "run" / "checkpoints")
    assert find_weights(tmp_path / "run").parent.name == "step-00000010"


def test_a_run_that_was_moved_finds_its_store_where_it_is_now(made, tmp_path):
    shutil.copytree(made / "run", tmp_path / "moved")
    target = find_target(tmp_path / "moved", None, None)
    assert target.config.store_url == str(tmp_path / "moved" / "store")
    assert load_config(made / "run" / "config.yaml").store_url == str(made / "run" / "store")


def test_a_weights_file_needs_no_run(made, tmp_path):
    save_file(weights(0), tmp_path / "plain.safetensors")
    options = [
        "--shards",
        made / "val-0.tar",
        "--index",
        made / "val.npz",
        "--size",
        48,
        "--resize",
        "square",
    ]
    options += ["--mean", 0.4, 0.5, 0.6, "--std", 0.2, 0.3, 0.4, "--name", "mine"]
    saved, report = evaluated(
        tmp_path / "plain.safetensors", "--backbone", BACKBONE, *options, output=tmp_path
    )
    assert np.array_equal(saved.logits, evaluated(made / "run", output=tmp_path / "run")[0].logits)
    assert report["model"] == "mine"


def test_real_labels_boxes_and_stored_heatmaps_are_in_the_report(made, tmp_path, capsys):
    real = [[n % NUM_CLASSES] if n else [] for n in range(NUM_IMAGES + 2)]
    (tmp_path / "real.json").write_text(json.dumps(real))
    _, report = evaluated(
        made / "run", "--real", tmp_path / "real.json", "--boxes", "--heatmaps", output=tmp_path
    )
    assert report["headline"].startswith(f"PARTIAL, {NUM_IMAGES} of {NUM_IMAGES + 2} images")
    assert report["missing"] == [f"ILSVRC2012_val_{n:08d}" for n in (12, 13)]
    assert report["num_images"] == NUM_IMAGES - 1
    assert report["original"]["num_images"] == NUM_IMAGES
    assert report["localization"].keys() == {"network maps", "stored heatmaps of training images"}
    stored = report["localization"]["stored heatmaps of training images"]
    assert stored["given"]["num_pairs"] == NUM_IMAGES
    # Never visited: flat, so they point as well as chance.
    assert stored["given"]["hit_rate"] == stored["given"]["chance"]
    assert "| present classes |" in capsys.readouterr().out


def test_boxes_take_no_second_pass_over_the_images_and_change_no_logit(made, tmp_path, monkeypatch):
    plain, _ = evaluated(made / "run", output=tmp_path / "plain")
    loaders = []

    class CountedLoader(Loader):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            loaders.append(self)

    monkeypatch.setattr("bigscl.evaluate.Loader", CountedLoader)
    saved, report = evaluated(made / "run", "--boxes", output=tmp_path / "boxes")
    assert len(loaders) == 1
    assert report["localization"].keys() == {"network maps"}
    np.testing.assert_array_equal(saved.logits, plain.logits)


def test_map_pooling_is_reported_from_the_same_pass_with_the_plain_figures_beside_it(made, tmp_path):
    plain, own = evaluated(made / "run", output=tmp_path / "plain")
    saved, report = evaluated(made / "run", "--pooling", "map", output=tmp_path / "map")
    assert (own["pooling"], report["pooling"]) == ("plain", "map")
    np.testing.assert_array_equal(saved.logits, plain.logits)
    np.testing.assert_array_equal(saved.map_logits, plain.map_logits)
    assert not np.array_equal(saved.map_logits, saved.logits)
    assert report["poolings"] == own["poolings"]
    assert report["poolings"]["map"]["map"] == report["mean_ap"]["present"]
    assert report["poolings"]["plain"]["map"] == own["mean_ap"]["present"]
    text = (tmp_path / "map" / "report.md").read_text()
    assert text.startswith("# run/best, map pooling on 11 images")
    assert "\n| plain | " in text
    assert "\n| map | " in text


def test_unreadable_images_are_missing_by_name(made, tmp_path):
    members = [*labelled("good", 1, full=[0]), ("bad.jpg", b"no image"), *labelled("bad", 2, full=[1])[1:]]
    path = write_tar(tmp_path / "x.tar", members)
    scan(str(path), num_classes=NUM_CLASSES)[0].save(tmp_path / "x.npz")
    options = ["--shards", path, "--index", tmp_path / "x.npz"]
    _, report = evaluated(made / "run", *options, "--max-bad-share", 0.5, output=tmp_path)
    assert report["headline"] == "PARTIAL, 1 of 2 images: run/best on 1 images"
    assert report["missing"] == ["bad"]


def test_published_weights_say_how_images_are_prepared():
    target = find_target(None, "resnet50", "IMAGENET1K_V2")
    assert (target.transform.size, target.transform.resize, target.transform.shorter) == (224, "shorter", 232)
    assert target.mean == (0.485, 0.456, 0.406)
    assert find_target(None, "resnet50", "IMAGENET1K_V1").transform.shorter == 256


def test_another_size_keeps_the_part_of_the_image_that_is_seen():
    target = find_target(None, "resnet50", "IMAGENET1K_V1")
    small, large = (with_overrides(target, EvaluationOptions(size=size)) for size in (112, 448))
    assert (small.transform.shorter, large.transform.shorter) == (128, 512)
    assert with_overrides(target, EvaluationOptions(size=112, shorter=200)).transform.shorter == 200


def lively(network):
    """The network with running statistics under which images differ in their logits."""
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = 1.0
    with torch.no_grad():
        network.train()(torch.randn(8, 3, 96, 96))
    return network.eval()


def test_published_weights_by_name_predict_as_their_library_does(tmp_path, monkeypatch):
    # Weights that are in torch's cache are not downloaded; these are made up, and have the published name.
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    torch.manual_seed(0)
    network = lively(models.shufflenet_v2_x0_5(weights=None))
    preset = models.ShuffleNet_V2_X0_5_Weights.IMAGENET1K_V1
    cached = tmp_path / "torch" / "hub" / "checkpoints" / preset.url.rpartition("/")[2]
    cached.parent.mkdir(parents=True)
    torch.save(network.state_dict(), cached)
    members = [m for n in (1, 2, 3) for m in classed(f"ILSVRC2012_val_{n:08d}", n, 300 * n)]
    path = write_tar(tmp_path / "val-0.tar", members)
    index = scan(str(path), num_classes=1000)[0]
    index.save(tmp_path / "bigscl-index-val.npz")
    (tmp_path / "real.json").write_text(json.dumps([[300], [], [7, 900]]))
    options = ["--weights", "IMAGENET1K_V1", "--shards", path, "--real", tmp_path / "real.json"]
    saved, report = evaluated("--backbone", "shufflenet_v2_x0_5", *options, output=tmp_path / "out")
    images = list(read_images(index, index.ids()).values())
    with torch.no_grad():
        expected = network(torch.stack([preset.transforms()(to_pil_image(image)) for image in images]))
    found = torch.from_numpy(saved.logits).float()
    assert (expected - expected.mean(0)).abs().mean() > 30 * (found - expected).abs().mean()
    assert report["model"] == "shufflenet_v2_x0_5 IMAGENET1K_V1"
    assert (report["num_images"], report["original"]["num_images"]) == (2, 3)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "nothing to evaluate"),
        (["--backbone", "resnet18"], "nothing to evaluate"),
        (["{run}", "--weights", "DEFAULT"], "--weights: has no effect with"),
        (["{run}", "--batch-size", "0"], "Invalid value for '--batch-size'"),
        (["{run}", "--size", "-3"], "Invalid value for '--size'"),
        (["{run}", "--std", "0.2", "0", "0.2"], "--std (0.2, 0.0, 0.2): expected 1e-06 to 100"),
        (["{run}", "--mean", "nan", "0", "0"], "--mean (nan, 0.0, 0.0): expected 0 to 1"),
        (["{run}", "--max-bad-share", "2"], "--max-bad-share 2.0: expected 0 to 1"),
        (["{run}", "-o", "{val}"], "val-0.tar is a file. Choose a folder that can be written to"),
        (["{run}", "-o", "{val}/deep/down"], "val-0.tar is a file. Choose a folder that can be written to"),
        (["{val}/deep"], "val-0.tar/deep: neither a weights file"),
        (["{run}", "--bogus"], "No such option"),
        (["{run}/nowhere"], "neither a weights file, nor a run or a checkpoint"),
        (["{run}", "--shorter", "99"], "--shorter: has no effect with --resize square"),
        (["{run}", "--pooling", "logits"], "'logits' is not one of 'plain', 'map'"),
        (["--backbone", "resnet18", "--weights", "V9", "--shards", "{val}"], "no weights 'V9'"),
        (["--backbone", "nonet", "--weights", "DEFAULT", "--shards", "{val}"], "no classification network"),
        (["{bare}", "--shards", "{val}"], "Name its network with --backbone"),
        (["{bare}", "--backbone", BACKBONE], "--shards: missing"),
        (["{bare}", "--backbone", BACKBONE, "--shards", "{val}"], "predicts 5 classes, the shards have 3"),
        (["{run}", "--real", "{run}/real.json"], "real.json: no such file"),
        (["{plain}", "--backbone", BACKBONE, "--shards", "{val}", "--heatmaps"], "--heatmaps: needs a run"),
        (["{run}", "--shards", "{boxless}", "--boxes"], "none of these 2 samples has any"),
        (["{bare}", "--backbone", BACKBONE, "--shards", "{gone}"], "no index of these"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(made, tmp_path, capsys, arguments, complaint):
    save_file(build_model(BACKBONE, 5).network.state_dict(), tmp_path / "bare.safetensors")
    shutil.copy(made / "val.npz", made / "bigscl-index-val.npz")
    names = {"run": made / "run", "val": made / "val-0.tar", "bare": tmp_path / "bare.safetensors"}
    names |= {"gone": tmp_path / "gone.tar", "plain": made / "run/best/model.safetensors"}
    names["boxless"] = write_tar(tmp_path / "b-0.tar", [*classed("a", 0, 1), *classed("b", 1, 2)])
    scan(str(names["boxless"]), num_classes=NUM_CLASSES)[0].save(tmp_path / "bigscl-index-b.npz")
    assert main([argument.format(**names) for argument in arguments]) == 2
    said = capsys.readouterr().err.strip().splitlines()
    assert len([line for line in said if line.startswith("bigscl.evaluate: ")]) == 1
    assert complaint in said[-1]
