"""A run's network in files that need no bigscl, each checked against the run's own logits."""

import importlib
import inspect
import json
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bigscl.common.user_error import UserError
from bigscl.evaluation.target import EvaluationTarget, build_network
from bigscl.models.families import PublishedModel, create_network, family_of
from bigscl.models.families.weights import read_state
from bigscl.training.checkpoint.checkpoint_folder import write_tensors

WEIGHTS, ONNX = "model.safetensors", "model.onnx"
LARGEST_DIFFERENCE = 1e-4
"""Of a logit, relative to the largest one of the images (if that is above 1)."""
BATCHES = (1, 3)
"""Sizes of the batches that are compared: the files take any."""


def write_portable_files(
    target: EvaluationTarget, class_names: Sequence[str], folder: Path, *, onnx: bool
) -> dict[str, float]:
    """Write weights, preprocessing, class names and an exported network; return each network's difference."""
    if onnx and "external_data" not in inspect.signature(torch.onnx.export).parameters:
        raise UserError(f"--onnx: needs torch 2.6 or newer, found {torch.__version__}. Add --no-onnx.")
    trained = build_network(target, len(class_names))
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
    expected: Callable[[Tensor], Tensor] = lambda images: trained(images).logits  # noqa: E731
    return {
        name: compare(expected, network, target.transform.size, name) for name, network in networks.items()
    }


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
    """Write values as an indented JSON file."""
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
    runtime: Any = importlib.import_module("onnxruntime")
    session = runtime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    return lambda images: torch.from_numpy(session.run(["logits"], {"images": images.numpy()})[0])
