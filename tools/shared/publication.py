"""The network of a run for other people: files that need no bigscl, and a model card."""

import importlib
import inspect
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import Tensor, nn

from bigscl.common.files import read_json_object
from bigscl.common.user_error import UserError
from bigscl.config import Config, to_yaml
from bigscl.evaluation.report_files import markdown_table, percent
from bigscl.evaluation.target import EvaluationTarget, build_network
from bigscl.models.families import PublishedModel, create_network, family_of
from bigscl.models.families.base import read_state
from bigscl.models.spatial import SpatialClassifier
from bigscl.training.checkpoint_folder import write_tensors

WEIGHTS, ONNX = "model.safetensors", "model.onnx"
LARGEST_DIFFERENCE = 1e-4
"""Of a logit, relative to the largest one of the images (if that is above 1)."""
BATCHES = (1, 3)
"""Sizes of the batches that are compared: the files take any."""


def write_portable_files(
    target: EvaluationTarget, class_names: Sequence[str], folder: Path, *, onnx: bool, offset: float = 0.0
) -> dict[str, float]:
    """Write weights, preprocessing, class names and an exported network; return each network's difference.

    `offset` is added to all logits, in the bias of the linear layer; differences are from the logits of the
    run plus the offset.
    """
    if onnx and "external_data" not in inspect.signature(torch.onnx.export).parameters:
        raise UserError(f"--onnx: needs torch 2.6 or newer, found {torch.__version__}. Add --no-onnx.")
    trained = build_network(target, len(class_names))
    expected: Callable[[Tensor], Tensor] = lambda images: trained(images).logits  # noqa: E731
    if offset:
        unchanged = build_network(target, len(class_names))
        expected = lambda images: unchanged(images).logits + offset  # noqa: E731
        _add_offset(trained, offset)
    with (folder / WEIGHTS).open("wb") as file:
        write_tensors(trained.network.state_dict())(file)
    # The plain network, without the hooks of the score maps, from the file that others will load.
    plain = create_network(target.backbone, len(class_names), None, target.args).eval()
    plain.load_state_dict(read_state(str(folder / WEIGHTS)), strict=True)
    (folder / "classes.txt").write_text("".join(f"{name}\n" for name in class_names))
    write_json(folder / "preprocessing.json", preprocessing(target))
    family, name = family_of(target.backbone)
    model = PublishedModel(
        name=name,
        args=target.args,
        class_names=class_names,
        num_features=trained.head.linear(plain).in_features,
        transform=target.transform,
        mean=target.mean,
        std=target.std,
    )
    if (config := family.config_file(model)) is not None:
        write_json(folder / "config.json", config)
    networks: dict[str, Callable[[Tensor], Tensor]] = {WEIGHTS: plain}
    if onnx:
        networks[ONNX] = _export_onnx(plain, target.transform.size, folder / ONNX)
    return {
        name: compare(expected, network, target.transform.size, name) for name, network in networks.items()
    }


def _add_offset(trained: SpatialClassifier, offset: float) -> None:
    linear = trained.head.linear(trained.network)
    if linear.bias is None:
        raise UserError(
            f"--offset {offset:+g}: layer {trained.head.name} of the network has no bias to add it to. Use "
            f"--offset none."
        )
    with torch.no_grad():
        linear.bias.add_(offset)


def preprocessing(target: EvaluationTarget) -> dict[str, Any]:
    """Return how images become the network's input, and its logits scores."""
    how = target.transform
    return {
        "input": f"images, float32 [batch, 3, {how.size}, {how.size}], RGB",
        "size": how.size,
        "resize": how.resize,
        "shorter": how.shorter if how.resize == "shorter" else None,
        "interpolation": how.interpolation,
        "antialias": True,
        "scale": 1 / 255,
        "mean": list(target.mean),
        "std": list(target.std),
        "output": "logits, float32 [batch, classes]; the score of each class is its sigmoid",
    }


def write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n")


def compare(
    expected: Callable[[Tensor], Tensor], network: Callable[[Tensor], Tensor], side: int, name: str
) -> float:
    """Return the largest difference of the logits of two networks; UserError if it is too large."""
    largest = 0.0
    for count in BATCHES:
        images = torch.randn(count, 3, side, side, generator=torch.Generator().manual_seed(count))
        with torch.no_grad():
            wanted, found = expected(images), network(images)
        difference = (wanted - found).abs().max().item()
        if not difference <= LARGEST_DIFFERENCE * max(1.0, wanted.abs().max().item()):
            raise UserError(
                f"{name}: its logits differ by {difference:.2g} from those of the run, expected at most "
                f"{LARGEST_DIFFERENCE:g} of the largest. Nothing was written."
            )
        largest = max(largest, difference)
    return largest


def _traced(network: nn.Module, side: int) -> torch.export.ExportedProgram:
    # Two images: with one, the tracer would take the size of the batch for a constant.
    images = torch.zeros(2, 3, side, side)
    try:
        traced = torch.export.export(network, (images,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:
        reason = str(error).strip().partition("\n")[0] or type(error).__name__
        raise UserError(
            f"{type(network).__name__}: torch.export cannot export it ({reason}). Add --no-onnx."
        ) from error
    for node in traced.graph.nodes:
        # Lines of source files, with their local paths.
        node.meta.pop("stack_trace", None)
    return traced


def _export_onnx(network: nn.Module, side: int, path: Path) -> Callable[[Tensor], Tensor]:
    """Write the network as ONNX, and return it as onnxruntime runs it."""
    with warnings.catch_warnings():
        # Of the exporter about its own internals.
        warnings.simplefilter("ignore")
        torch.onnx.export(
            _traced(network, side),
            (torch.zeros(2, 3, side, side),),
            str(path),
            dynamo=True,
            external_data=False,
            input_names=["images"],
            output_names=["logits"],
            verbose=False,
        )
    _name_batch_axis(path)
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])


def _name_batch_axis(path: Path) -> None:
    """Call the first axis of inputs and outputs `batch`; the exporter numbers it, as `s77`."""
    onnx: Any = importlib.import_module("onnx")
    model = onnx.load(str(path))
    graph = model.graph
    numbered = {value.type.tensor_type.shape.dim[0].dim_param for value in (*graph.input, *graph.output)}
    for value in (*graph.input, *graph.output, *graph.value_info):
        for axis in value.type.tensor_type.shape.dim:
            if axis.dim_param and axis.dim_param in numbered:
                axis.dim_param = "batch"
    onnx.save(model, str(path))


# The card

NOT_STATED = "not stated"
LOCAL = ("run", "store.url", "store.endpoint", "store.region", "data.train_index", "data.val_index")
"""Settings that say nothing to others."""
FILES = ("train", "val", "labels_file", "answers", "val_labels_file")
PATHS = (*(f"data.{name}" for name in FILES), "model.weights")
"""Settings of which only the last part of the path is published."""
MOST_NAMES = 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Licences:
    weights: str | None
    dataset: str | None
    data: str | None


def model_card(
    target: EvaluationTarget,
    class_names: Sequence[str],
    title: str,
    licences: Licences,
    *,
    files: Sequence[str],
    repository: str | None,
    offset: float = 0.0,
) -> str:
    """Return the card: data, settings, results, use, licences. `files` are those of the network."""
    config = target.config
    assert config is not None
    settings = published_settings(config)
    results = find_results(config.run, target, offset)
    parts = [
        f"---\n{yaml.safe_dump(_front(target, licences, title, results), sort_keys=False)}---",
        f"# {title}",
        f"A multi-label image classifier: `{target.backbone}` with {len(class_names):,} classes, trained "
        f"with bigscl ({method(config)}). Each class has its own score, the sigmoid of its logit. These are "
        f"{describe_weights(target)}.",
        "## Data",
        _data(config, class_names, licences),
        "## Results",
        _results(results),
        "## Use",
        _use(target, len(class_names), files, repository, offset),
        "## Settings",
        f"```yaml\n{yaml.safe_dump(settings, sort_keys=False)}```",
        "## Licence",
        f"Weights: {licences.weights or NOT_STATED}. Training data: {licences.data or NOT_STATED}. bigscl, "
        f"which trained them: Apache-2.0.",
    ]
    return "\n\n".join(parts) + "\n"


def describe_weights(target: EvaluationTarget) -> str:
    """Return which weights of a run these are: of which epoch, and whether they are averaged."""
    file, config = Path(target.weights), target.config
    assert config is not None
    ema = config.weight_ema
    if file.parent.name == "best":
        epoch = _facts(file.parent / "metrics.json").get("epoch")
        of_epoch = "" if epoch is None else f", of epoch {epoch}"
        kind = "not averaged" if ema is None else f"running average over the steps, weight_ema {ema:g}"
        return f"the best weights of the run{of_epoch} ({kind})"
    if (epoch := _facts(file.parent / "progress.json").get("epoch")) is not None:
        kind = "not averaged" if ema is None else "not averaged: the run's average is in its folder best"
        return f"the weights of {file.parent.name}, epoch {epoch} ({kind})"
    return f"the weights in {file.name}"


def _facts(file: Path) -> dict[str, Any]:
    return (read_json_object(file) or {}) if file.is_file() else {}


def lacks_names(class_names: Sequence[str]) -> bool:
    """Return whether the data do not name their classes, which then are numbers."""
    return list(class_names) == [str(number) for number in range(len(class_names))]


def published_settings(config: Config) -> dict[str, Any]:
    settings: dict[str, Any] = yaml.safe_load(to_yaml(config))
    for dotted in (*LOCAL, *PATHS):
        *sections, name = dotted.split(".")
        inner = settings
        for section in sections:
            inner = inner[section]
        if dotted in LOCAL:
            inner.pop(name, None)
        elif inner.get(name) is not None:
            inner[name] = Path(inner[name]).name
    return settings


def find_results(run: Path, target: EvaluationTarget, offset: float = 0.0) -> dict[str, Any]:
    """Return the figures of these weights in the run's evaluation, else in its validation, else none.

    Those that an offset of the logits changes are left out, unless the evaluation has them for this offset.
    """
    weights, report = Path(target.weights), run / "evaluation" / "report.json"
    # A report that is older than the weights is of earlier ones.
    fresh = report.is_file() and report.stat().st_mtime >= weights.stat().st_mtime
    found = read_json_object(report) if fresh else None
    if found is not None and found.get("model") == target.name:
        return {
            "of": f"evaluation on {found['num_images']:,} images, against {_against(found)}",
            "mAP": found["mean_ap"]["present"],
            "AP per image": found.get("image_ap"),
            "top-1": found["top1"],
            "F1 at 0.5": _f1(found, offset),
        }
    metrics = weights.parent / "metrics.json"
    if metrics.is_file() and "map" in (found := read_json_object(metrics) or {}):
        of = f"validation after epoch {found['epoch']}"
        return {"of": of, "mAP": found["map"], "top-1": found["top1"]}
    return {}


def _f1(report: dict[str, Any], offset: float) -> float | None:
    if not offset:
        return float(report["at_threshold"]["overall_f1"])
    known = report.get("offset")
    is_same = known is not None and abs(known - offset) < 1e-5
    return float(report["at_offset"]["overall_f1"]) if is_same else None


def _against(report: dict[str, Any]) -> str:
    return {"full": "all their labels", "given": "their given labels"}.get(report["labels"], "ReaL labels")


def _front(
    target: EvaluationTarget, licences: Licences, title: str, results: dict[str, Any]
) -> dict[str, Any]:
    front: dict[str, Any] = {"license": licences.weights or "unknown", "pipeline_tag": "image-classification"}
    front["library_name"] = family_of(target.backbone)[0].library_name
    front["tags"] = ["multi-label", "image-classification", "spatial-consistency-loss"]
    if licences.dataset is not None:
        front["datasets"] = [licences.dataset]
    figures = {name: value for name, value in results.items() if name != "of" and value is not None}
    if figures:
        metrics = [{"type": name, "value": round(100 * value, 2)} for name, value in figures.items()]
        data = {"name": licences.dataset or NOT_STATED, "type": "other"}
        result = {"task": {"type": "image-classification"}, "dataset": data, "metrics": metrics}
        front["model-index"] = [{"name": title, "results": [result]}]
    return front


def method(config: Config) -> str:
    objective = config.objective
    consistency = "" if objective.consistency == "none" else f" with consistency {objective.consistency}"
    return f"objective {objective.base}{consistency}, {config.schedule.epochs} epochs"


def _data(config: Config, class_names: Sequence[str], licences: Licences) -> str:
    seen = "all labels" if config.data.labels == "full" else "partial labels"
    if config.data.labels_file is not None:
        seen += f" of {config.data.labels_file.name}"
    names = f"Classes: {', '.join(class_names[:MOST_NAMES])}"
    if len(class_names) > MOST_NAMES:
        names += f", ... ({len(class_names):,} in classes.txt)"
    if lacks_names(class_names):
        names = f"Names of the {len(class_names):,} classes are missing: the data number them from 0"
    shards = Path(config.data.train).name
    return f"Trained on {licences.dataset or f'shards `{shards}`'} with {seen}. {names}."


def _results(results: dict[str, Any]) -> str:
    if not results:
        return "None: the run has neither been evaluated nor validated."
    figures = {name: value for name, value in results.items() if name != "of" and value is not None}
    table = markdown_table(["", *figures], [[results["of"], *map(percent, figures.values())]])
    return (
        f"{table}\n\nIn percent. mAP ranks images within each class, AP per image classes within each image."
    )


def _use(
    target: EvaluationTarget, num_classes: int, files: Sequence[str], repository: str | None, offset: float
) -> str:
    listed = ", ".join(f"`{name}`" for name in files)
    how, side = target.transform.interpolation, target.transform.size
    added = "" if not offset else f" plus {offset:+.3f}, with which 0.5 is a usable threshold"
    lines = [
        f"{listed}: the same network, whose logits agree with those of the run{added}. `preprocessing.json` "
        f"says how images are prepared ({side} x {side}, {how}, ...), `classes.txt` names the outputs in "
        f"order.",
        "",
        "```python",
    ]
    family, name = family_of(target.backbone)
    lines += family.loading_code(name, num_classes, target.args, repository)
    return "\n".join([*lines, "```"])
