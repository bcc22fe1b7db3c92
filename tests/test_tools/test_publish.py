"""`bigscl publish`: files that give the run's logits without bigscl, a card, an upload to a stub."""

import inspect
import json
import os
import re
import shutil

import huggingface_hub
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from bigscl.config import load_config, make_config, to_yaml
from bigscl.data.build_index import scan
from bigscl.data.index import load_index
from bigscl.evaluation.memory_figures import memory_offset, score_reached_by
from bigscl.evaluation.predictions import load_predictions
from bigscl.models.spatial import build_model
from bigscl.store import GroupSpec, HeatmapStore, Rows, update
from bigscl.tools.shared import publication
from bigscl.tools.verbs import publish
from tests.builders import labelled, write_tar
from tests.test_bigscl.test_evaluate import same_process_afterwards  # noqa: F401
from tests.test_tools.test_report_verb import run

NAMES = ["cat", "dog", "cow"]
OWN = "bigscl.models.smallnet:small_resnet"
SMALL_VIT = {"img_size": 48, "embed_dim": 24, "depth": 2, "num_heads": 2, "global_pool": "avg"}


def make_run(folder, backbone=OWN, args=None, **sections):
    """A run as training leaves it: config, best weights with their metrics, and its shards."""
    write_tar(folder / "t-0.tar", [member for n in range(3) for member in labelled(f"k{n}", n, given=[n])])
    scan(str(folder / "t-0.tar"), class_names=NAMES)[0].save(folder / "bigscl-index-t.npz")
    model = {"backbone": backbone, "args": args or {}}
    data = {"train": str(folder / "t-0.tar"), "val": str(folder / "t-0.tar"), "size": 48, "shorter": 56}
    config = make_config({"run": str(folder / "mine"), "data": data, "model": model, **sections})
    torch.manual_seed(0)
    state = build_model(backbone, len(NAMES), args=args).network.state_dict()
    (folder / "mine" / "best").mkdir(parents=True)
    save_file(state, folder / "mine" / "best" / "model.safetensors")
    (folder / "mine" / "best" / "metrics.json").write_text('{"epoch": 5, "map": 0.5, "top1": 0.25}')
    (folder / "mine" / "config.yaml").write_text(to_yaml(config))
    return folder / "mine"


def logits_of_run(path, images, backbone=OWN, args=None):
    weights = str(path / "best" / "model.safetensors")
    with torch.no_grad():
        return build_model(backbone, len(NAMES), weights=weights, args=args).eval()(images).logits


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    if "external_data" not in inspect.signature(torch.onnx.export).parameters:
        pytest.skip("this torch exports no ONNX that we write")
    folder = tmp_path_factory.mktemp("publish")
    words = ["--license", "apache-2.0", "--dataset", "animals", "--data-license", "research only"]
    assert run("publish", make_run(folder), folder / "out", *words) == 0
    return folder


def test_the_first_axis_of_the_onnx_network_is_called_batch(published):
    onnxruntime = pytest.importorskip("onnxruntime")
    path = str(published / "out" / "model.onnx")
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    assert [value.shape[0] for value in (*session.get_inputs(), *session.get_outputs())] == ["batch", "batch"]


def test_every_network_file_gives_the_logits_of_the_run_in_any_batch(published):
    import onnxruntime

    folder = published / "out"
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    for batch in (1, 2, 5):
        images = torch.randn(batch, 3, 48, 48)
        expected = logits_of_run(published / "mine", images)
        assert expected.std() > 1e-3
        found = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    weights = load_file(folder / "model.safetensors")
    trained = load_file(published / "mine" / "best" / "model.safetensors")
    assert weights.keys() == trained.keys()
    assert all(torch.equal(weights[name], trained[name]) for name in weights)


def test_preprocessing_and_class_names_are_written(published):
    found = json.loads((published / "out" / "preprocessing.json").read_text())
    assert (found["size"], found["resize"], found["shorter"], found["interpolation"]) == (
        48,
        "shorter",
        56,
        "bilinear",
    )
    assert found["mean"] == [0.485, 0.456, 0.406]
    assert (published / "out" / "classes.txt").read_text().splitlines() == NAMES


def test_the_card_has_data_settings_results_and_licences(published):
    text = (published / "out" / "README.md").read_text()
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["license"] == "apache-2.0"
    assert front["datasets"] == ["animals"]
    metrics = front["model-index"][0]["results"][0]["metrics"]
    assert metrics == [{"type": "mAP", "value": 50.0}, {"type": "top-1", "value": 25.0}]
    assert "validation after epoch 5 | 50.00 | 25.00 |" in text
    assert "Classes: cat, dog, cow." in text
    assert "Weights: apache-2.0. Training data: research only." in text
    settings = yaml.safe_load(re.search(r"```yaml\n(.*?)```", text, re.S)[1])
    assert settings["data"]["train"] == "t-0.tar"
    assert "run" not in settings


def test_no_local_path_is_published(published):
    for file in (published / "out").iterdir():
        content = file.read_bytes()
        assert os.fsencode(published) not in content, file.name
        assert os.fsencode(os.path.dirname(torch.__file__)) not in content, file.name


def test_an_evaluation_of_these_weights_comes_before_the_validation(tmp_path):
    path = make_run(tmp_path)
    assert run("evaluate", path, "--workers", 0) == 0
    assert run("publish", path, tmp_path / "out", "--no-onnx") == 0
    text = (tmp_path / "out" / "README.md").read_text()
    assert "evaluation on 3 images, against their given labels" in text
    assert "| AP per image |" in text
    report = path / "evaluation" / "report.json"
    report.write_text(report.read_text().replace("mine/best", "mine/checkpoints/step-00000001"))
    assert run("publish", path, tmp_path / "other", "--no-onnx") == 0
    assert "validation after epoch 5" in (tmp_path / "other" / "README.md").read_text()


def code_of_card(folder):
    return re.search(r"```python\n(.*?)```", (folder / "README.md").read_text(), re.S)[1]


def test_the_code_of_the_card_loads_a_torchvision_network(tmp_path, monkeypatch):
    path = make_run(tmp_path, "resnet18")
    assert run("publish", path, tmp_path / "out", "--no-onnx") == 0
    assert not (tmp_path / "out" / "model.onnx").exists()
    monkeypatch.chdir(tmp_path / "out")
    names = {}
    exec(code_of_card(tmp_path / "out"), names)
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        found = names["network"].eval()(images)
    torch.testing.assert_close(found, logits_of_run(path, images, "resnet18"), rtol=0, atol=1e-5)


def test_timm_loads_the_published_folder(tmp_path, monkeypatch):
    timm = pytest.importorskip("timm", minversion="1.0.16", reason="older ones load no local folder")
    backbone = "timm:vit_tiny_patch16_224"
    path = make_run(tmp_path, backbone, args=SMALL_VIT)
    assert run("publish", path, tmp_path / "out", "--no-onnx") == 0
    monkeypatch.chdir(tmp_path / "out")
    names = {}
    exec(code_of_card(tmp_path / "out"), names)
    network = names["network"].eval()
    images = torch.randn(2, 3, 48, 48)
    with torch.no_grad():
        found = network(images)
    expected = logits_of_run(path, images, backbone, SMALL_VIT)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    how = timm.data.resolve_model_data_config(network)
    assert list(how["input_size"]) == [3, 48, 48]
    assert (how["interpolation"], round(48 / how["crop_pct"])) == ("bilinear", 56)


class Hub:
    """Stands for huggingface_hub.HfApi."""

    calls: list

    def create_repo(self, repo_id, *, private, exist_ok):
        self.calls.append(("create", repo_id, private, exist_ok))

    def upload_folder(self, *, repo_id, folder_path, commit_message):
        self.calls.append(("upload", repo_id, sorted(os.listdir(folder_path))))


def test_the_folder_is_uploaded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(Hub, "calls", [], raising=False)
    words = ["--no-onnx", "--push-to-hub", "me/mine", "--private", "--json"]
    assert run("publish", make_run(tmp_path), tmp_path / "out", *words) == 0
    files = ["README.md", "classes.txt", "model.safetensors", "preprocessing.json"]
    assert Hub.calls == [("create", "me/mine", True, True), ("upload", "me/mine", files)]
    facts = json.loads(capsys.readouterr().out)
    assert facts["pushed_to"] == "me/mine"
    assert facts["differences"].keys() == {"model.safetensors"}


def test_a_failed_upload_says_how_to_upload_the_folder(tmp_path, monkeypatch, capsys):
    class Unreachable(Hub):
        def create_repo(self, repo_id, **options):
            raise OSError("401 Client Error\nInvalid token")

    monkeypatch.setattr(huggingface_hub, "HfApi", Unreachable)
    words = ["--no-onnx", "--push-to-hub", "me/mine"]
    assert run("publish", make_run(tmp_path), tmp_path / "out", *words) == 2
    message = capsys.readouterr().err
    assert "--push-to-hub me/mine: 401 Client Error Invalid token" in message
    assert f"`hf upload me/mine {tmp_path / 'out'}`" in message
    assert (tmp_path / "out" / "model.safetensors").exists()


def test_a_file_with_other_logits_is_not_published(tmp_path, monkeypatch, capsys):
    def export(network, side, path):
        return lambda images: network(images) + 0.01

    monkeypatch.setattr(publication, "_export_onnx", export)
    assert run("publish", make_run(tmp_path), tmp_path / "out") == 2
    assert "model.onnx: its logits differ by 0.01 from those of the run" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


class Stubborn(torch.nn.Module):
    """A network whose way depends on its input, which torch.export cannot follow."""

    def __init__(self, num_classes):
        super().__init__()
        self.features, self.scores = torch.nn.Conv2d(3, 4, 8, 8), torch.nn.Linear(4, num_classes)

    def forward(self, images):
        features = self.features(images)
        if features.mean().item() > 1e9:
            features = -features
        return self.scores(features.mean((2, 3)))


def test_weights_are_published_of_a_network_that_cannot_be_exported(tmp_path, capsys):
    path = make_run(tmp_path, f"{__name__}:Stubborn")
    assert run("publish", path, tmp_path / "out") == 2
    assert "Stubborn: torch.export cannot export it" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
    assert run("publish", path, tmp_path / "out", "--no-onnx") == 0
    files = sorted(os.listdir(tmp_path / "out"))
    assert files == ["README.md", "classes.txt", "model.safetensors", "preprocessing.json"]
    assert "torch.export" not in code_of_card(tmp_path / "out")


def test_missing_packages_are_named_with_the_command_that_installs_them(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(publish, "find_spec", lambda package: None if package.startswith("onnx") else package)
    assert run("publish", make_run(tmp_path), tmp_path / "out") == 2
    message = capsys.readouterr().err
    assert "needs onnx, onnxscript, onnxruntime, not installed: pip install 'bigscl[publish]'" in message
    assert "--no-onnx" in message
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["{run}", "{run}"], "exists. Choose a new folder"),
        (["{run}", "{out}", "--private"], "--private: has no effect without --push-to-hub"),
        (["{run}/nowhere", "{out}"], "neither a weights file, nor a run or a checkpoint"),
        (["{run}", "{out}", "--classes", "{two}"], "predicts 3 classes, the shards have 2"),
    ],
)
def test_what_cannot_be_published_is_refused(tmp_path, capsys, words, message):
    path = make_run(tmp_path)
    (tmp_path / "two.txt").write_text("cat\ndog\n")
    places = {"run": path, "out": tmp_path / "out", "two": tmp_path / "two.txt"}
    assert run("publish", *(word.format(**places) for word in words), "--no-onnx") == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_class_names_come_from_a_file_where_the_shards_are_gone(tmp_path, capsys):
    path = make_run(tmp_path)
    (tmp_path / "t-0.tar").unlink()
    assert run("publish", path, tmp_path / "out", "--no-onnx") == 2
    assert "Or give --classes FILE" in capsys.readouterr().err
    (tmp_path / "names.txt").write_text("a\nb\nc\n")
    assert run("publish", path, tmp_path / "out", "--no-onnx", "--classes", tmp_path / "names.txt") == 0
    assert (tmp_path / "out" / "classes.txt").read_text() == "a\nb\nc\n"


# The offset of the logits


PREDICTED = np.array([[0.4, 0.3, 0.2], [0.6, 0.1, 0.1], [0.3, 0.2, 0.05]])


def fill_store(folder, index, predicted):
    """A store after one epoch with these predictions: a label starts at 1, of which 0.8 is left."""
    annotations = index.annotations()
    HeatmapStore.create(str(folder), annotations, heatmap_size=12, group=GroupSpec(layout="scores"))
    with HeatmapStore.open(str(folder), annotations=annotations, mode="w", run="r") as store:
        scores = 0.8 * annotations.of_rows(index.ids()) + 0.2 * predicted
        rows = Rows(scores=scores.astype(np.float16), sample_visits=np.ones(len(scores), np.uint8))
        update(store, 0, index.ids(), rows)
        store.commit(epoch=0, step=1, attributes={"momentum": 0.8})


@pytest.fixture(scope="module")
def shifted(tmp_path_factory):
    """A run whose memory has been filled, published with the offset that it suggests."""
    folder = tmp_path_factory.mktemp("offset")
    path = make_run(folder, selection={"K": 2})
    fill_store(path / "store", load_index(str(folder / "t-*.tar")), PREDICTED)
    words = [] if "external_data" in inspect.signature(torch.onnx.export).parameters else ["--no-onnx"]
    assert run("publish", path, folder / "out", *words) == 0
    return folder


def test_as_many_predictions_as_expected_reach_one_half_with_the_offset(shifted):
    """Stored scores of labels are mostly their start at 1; only predictions count."""
    found = memory_offset(load_config(shifted / "mine" / "config.yaml"))
    assert (found.positives, found.num_samples) == (6, 3)
    sixth = np.sort(PREDICTED.ravel())[-6]
    assert found.threshold == pytest.approx(sixth, abs=0.005)
    assert found.value == pytest.approx(np.log(1 / sixth - 1), abs=0.03)
    assert "2.00 classes per training image" in str(found)
    annotations = load_index(str(shifted / "t-*.tar")).annotations()
    with HeatmapStore.open(str(shifted / "mine" / "store"), annotations=annotations) as store:
        for count, score in enumerate(np.sort(PREDICTED.ravel())[::-1], start=1):
            assert score_reached_by(store, count) == pytest.approx(score, abs=0.005)


def test_published_network_has_the_logits_of_the_run_plus_the_offset(shifted):
    offset = memory_offset(load_config(shifted / "mine" / "config.yaml")).value
    assert abs(offset) > 0.1
    images = torch.randn(2, 3, 48, 48)
    wanted = logits_of_run(shifted / "mine", images) + offset
    plain = build_model(OWN, len(NAMES), weights=str(shifted / "out" / "model.safetensors")).eval()
    with torch.no_grad():
        torch.testing.assert_close(plain(images).logits, wanted, rtol=0, atol=1e-5)
    text = (shifted / "out" / "README.md").read_text()
    assert f"those of the run plus {offset:+.3f}, with which 0.5 is a usable threshold" in text
    if (shifted / "out" / "model.onnx").exists():
        import onnxruntime

        path = str(shifted / "out" / "model.onnx")
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        found = torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("word", "added"), [("none", 0.0), ("-1.5", -1.5)])
def test_offset_is_the_one_that_is_given(shifted, tmp_path, word, added):
    assert run("publish", shifted / "mine", tmp_path / "out", "--no-onnx", "--offset", word) == 0
    ours = load_file(tmp_path / "out" / "model.safetensors")
    trained = load_file(shifted / "mine" / "best" / "model.safetensors")
    changed = {
        name: ours[name] - trained[name] for name in ours if not torch.equal(ours[name], trained[name])
    }
    assert len(changed) == bool(added)
    for difference in changed.values():
        assert difference.shape == (len(NAMES),)
        torch.testing.assert_close(difference, torch.full((len(NAMES),), added))


def test_offset_without_a_memory_is_none_and_says_why(tmp_path, capsys):
    path = make_run(tmp_path)
    assert run("publish", path, tmp_path / "out", "--no-onnx") == 0
    assert "no offset of the logits: " in capsys.readouterr().out
    assert run("publish", path, tmp_path / "other", "--no-onnx", "--offset", "much") == 2
    assert "--offset: found 'much', expected auto, none or a number" in capsys.readouterr().err


def test_report_and_card_have_f1_with_the_offset(shifted, tmp_path):
    path = shutil.copytree(shifted / "mine", tmp_path / "mine")
    assert run("evaluate", path, "--workers", 0) == 0
    report = json.loads((path / "evaluation" / "report.json").read_text())
    offset = memory_offset(load_config(path / "config.yaml", ["--run", str(path)])).value
    assert report["offset"] == pytest.approx(offset, abs=1e-5)
    saved = load_predictions(path / "evaluation" / "predictions.zarr")
    decided, present = saved.logits.astype(np.float32) + offset >= 0, saved.labels == 1
    f1 = 2 * (decided & present).sum() / (decided.sum() + present.sum())
    assert report["at_offset"]["overall_f1"] == pytest.approx(f1, abs=1e-5)
    text = (path / "evaluation" / "report.md").read_text()
    assert f"| as many as the memory expects: 0.5 with an offset of {offset:+.2f} |" in text
    assert run("publish", path, tmp_path / "out", "--no-onnx") == 0
    card = yaml.safe_load((tmp_path / "out" / "README.md").read_text().split("---\n")[1])
    figures = {one["type"]: one["value"] for one in card["model-index"][0]["results"][0]["metrics"]}
    assert figures["F1 at 0.5"] == pytest.approx(100 * f1, abs=0.01)
    assert run("publish", path, tmp_path / "other", "--no-onnx", "--offset", "2") == 0
    assert "F1 at 0.5" not in (tmp_path / "other" / "README.md").read_text()


@pytest.mark.parametrize(
    ("averages", "file", "told"),
    [
        ({}, "best", "the best weights of the run, of epoch 5 (not averaged)"),
        (
            {"weight_ema": 0.99},
            "best",
            "the best weights of the run, of epoch 5 (running average over the steps, weight_ema 0.99)",
        ),
        ({}, "checkpoints/step-00000007", "the weights of step-00000007, epoch 3 (not averaged)"),
        (
            {"weight_ema": 0.99},
            "checkpoints/step-00000007",
            "the weights of step-00000007, epoch 3 (not averaged: the run's average is in its folder best)",
        ),
    ],
)
def test_it_is_said_which_weights_are_published(tmp_path, capsys, averages, file, told):
    path = make_run(tmp_path, **averages)
    if file != "best":
        shutil.copytree(path / "best", path / file)
        (path / file / "progress.json").write_text('{"epoch": 3}')
        path /= file
    assert run("publish", path, tmp_path / "out", "--no-onnx") == 0
    assert capsys.readouterr().out.startswith(f"{tmp_path / 'out'}: {told}, {tmp_path}")
    assert told in (tmp_path / "out" / "README.md").read_text()
