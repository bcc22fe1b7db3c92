"""Targets of an evaluation: a run, a checkpoint, weights in a file or published, and their preprocessing."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bigscl.common.files import find_folder
from bigscl.common.user_error import UserError
from bigscl.config import Config, load_config, parse_yaml
from bigscl.data.transforms import MEAN, STD, EvaluationTransform
from bigscl.evaluation.evaluate_options import EvaluationOptions
from bigscl.models.families import NoPreprocessing, create_network, find_preprocessing
from bigscl.models.families.base import is_file, load_state, read_state
from bigscl.models.head import find_head
from bigscl.models.spatial import SpatialClassifier

CONFIG, WEIGHTS = "config.yaml", "model.safetensors"
CENTRE = EvaluationTransform(size=224, resize="shorter", shorter=256)
Color = tuple[float, float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationTarget:
    """A network, and the preprocessing of its images."""

    name: str
    backbone: str
    weights: str
    """A file, or the name of published weights."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of the network."""
    transform: EvaluationTransform = CENTRE
    mean: Color = MEAN
    std: Color = STD
    preprocessing: str = "the usual one for ImageNet"
    """Where transform, mean and std come from."""
    config: Config | None = None
    """The config of the run it comes from."""

    def describe_preprocessing(self) -> str:
        how, side = self.transform, self.transform.size
        area = (
            f"the whole image as {side} x {side}"
            if how.resize == "square"
            else f"shorter side to {how.shorter}, centre of {side} x {side}"
        )
        mean, std = (" ".join(f"{value:.4g}" for value in color) for color in (self.mean, self.std))
        return f"{self.preprocessing}: {area}, {how.interpolation}, mean {mean}, std {std}"


def find_target(model: Path | None, backbone: str | None, weights: str | None) -> EvaluationTarget:
    """Return what a command line names: a path, or a backbone with weights."""
    if model is None:
        if backbone is None or weights is None:
            raise UserError(
                "nothing to evaluate. Give a run, a checkpoint, a weights file, or --backbone and --weights."
            )
        return _of_backbone(backbone, weights)
    if weights is not None:
        raise UserError(f"--weights: has no effect with {model}. Give one of them.")
    file = find_weights(model)
    return _of_run(file) if backbone is None else _of_backbone(backbone, str(file))


def with_overrides(target: EvaluationTarget, options: EvaluationOptions) -> EvaluationTarget:
    """Return the target with the name and preprocessing of a command line."""
    changes = _given(options, "size", "resize", "shorter", "interpolation")
    if options.size is not None and options.shorter is None:
        # The same part of each image as before.
        changes["shorter"] = -(-options.size * target.transform.shorter // target.transform.size)
    changed = replace(target.transform, **changes)
    if options.shorter is not None and changed.resize == "square":
        raise UserError("--shorter: has no effect with --resize square")
    if options.args is not None:
        if target.config is not None:
            raise UserError("--args: has no effect on a run, which has its own in model.args")
        target = replace(target, args=_parse_args(options.args))
    own = _given(options, "size", "resize", "shorter", "interpolation", "mean", "std")
    if own:
        given = f"{target.preprocessing}, with {', '.join(own)} of the command line"
        target = replace(target, preprocessing=given)
    return replace(target, transform=changed, **_given(options, "name", "mean", "std"))


def _parse_args(text: str) -> dict[str, Any]:
    args = parse_yaml(text, f"--args {text}")
    if not isinstance(args, dict) or not all(isinstance(name, str) for name in args):
        raise UserError(f"--args {text}: expected keyword arguments, as '{{global_pool: avg}}'")
    return args


def _given(options: EvaluationOptions, *names: str) -> dict[str, Any]:
    """The options of these names that the command line has."""
    return {name: value for name in names if (value := getattr(options, name)) is not None}


def find_weights(path: Path) -> Path:
    """Return the weights file that a path means: of a run its best weights, else its newest checkpoint's."""
    if path.is_file():
        return path
    newest_first = sorted(path.glob(f"checkpoints/step-*/{WEIGHTS}"), reverse=True)
    candidates = [find_folder(path / "best") / WEIGHTS, path / WEIGHTS, *newest_first]
    file_there = next((file for file in candidates if file.is_file()), None)
    if file_there is None:
        raise FileNotFoundError(
            f"{path}: neither a weights file, nor a run or a checkpoint: no {WEIGHTS} there, in best/ or in "
            f"checkpoints/step-*/"
        )
    return file_there


def find_config(file: Path) -> Path | None:
    """Return the config of the run that a file belongs to."""
    configs: Iterable[Path] = (folder / CONFIG for folder in file.absolute().parents)
    return next((config for config in configs if config.is_file()), None)


def build_network(target: EvaluationTarget, num_classes: int) -> SpatialClassifier:
    """Build the network with its weights, in evaluation mode; refuse one with other classes."""
    network = create_network(target.backbone, num_classes, target.weights, target.args)
    head = find_head(network, target.backbone)
    outputs = head.linear(network).out_features
    if is_file(target.weights):
        state = read_state(target.weights)
        outputs = len(state.get(f"{head.name}.weight", range(num_classes)))
    if outputs != num_classes:
        raise UserError(
            f"{target.name}: predicts {outputs} classes, the shards have {num_classes}. Evaluate on shards "
            f"of the same classes; if some do not occur there, run `bigscl index --classes {outputs}`."
        )
    if is_file(target.weights):
        load_state(network, state, head.name, target.weights)
    model = SpatialClassifier(network, head).eval()
    model.check_side(target.transform.size, "--size")
    return model


def _of_run(file: Path) -> EvaluationTarget:
    path = find_config(file)
    if path is None:
        raise UserError(
            f"{file}: not in the folder of a run (no {CONFIG} above it). Name its network with --backbone."
        )
    # The folder may have been moved since training.
    config = load_config(path, ["--run", str(path.parent)])
    name = file.absolute().relative_to(path.parent.parent)
    return EvaluationTarget(
        name=str(name.parent if name.name == WEIGHTS else name),
        backbone=config.model.backbone,
        weights=str(file),
        args=config.model.args,
        transform=config.data.evaluation_transform(),
        mean=config.data.mean,
        std=config.data.std,
        preprocessing="that of the run",
        config=config,
    )


def _of_backbone(backbone: str, weights: str) -> EvaluationTarget:
    """Return a backbone with published weights or a file; those that are known define their preprocessing."""
    name = Path(weights).name if is_file(weights) else weights
    target = EvaluationTarget(name=f"{backbone} {name}", backbone=backbone, weights=weights)
    try:
        preprocessing = find_preprocessing(backbone, weights)
    except NoPreprocessing:
        return target  # if the backbone does not exist, creating the network says so
    return replace(
        target,
        transform=preprocessing.transform(),
        mean=preprocessing.mean,
        std=preprocessing.std,
        preprocessing="that of the published weights",
    )
