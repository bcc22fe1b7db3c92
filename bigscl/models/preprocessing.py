"""The preprocessing that published weights were trained with, as settings of `data`."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from bigscl.data.transforms import MEAN, STD, EvaluationTransform, Interpolation, Resize
from bigscl.models.backbones import import_callable, is_file
from bigscl.user_error import UserError

Color = tuple[float, float, float]


class NoPreprocessing(UserError):
    """Nobody has published how the images of these weights are prepared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Preprocessing:
    """How the images of some weights are prepared."""

    size: int = 224
    """Side of the network's input in training."""
    eval_size: int | None = None
    """Side in evaluation. Default: as in training."""
    resize: Resize = "shorter"
    shorter: int = 256
    """Shorter side before the centre is cut out in evaluation; for `resize: shorter`."""
    interpolation: Interpolation = "bilinear"
    mean: Color = MEAN
    std: Color = STD

    def transform(self) -> EvaluationTransform:
        """Return the transform of evaluation."""
        return EvaluationTransform(
            size=self.eval_size or self.size,
            resize=self.resize,
            shorter=self.shorter,
            interpolation=self.interpolation,
        )

    def settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of `data` that `given` lacks. For another size the crop fraction is kept."""
        settings: dict[str, Any] = asdict(self)
        if "size" in given and "eval_size" not in given:
            settings["eval_size"] = None
        chosen = {**settings, **given}
        if chosen["resize"] != "shorter":
            del settings["shorter"]
        else:
            side, own = chosen["eval_size"] or chosen["size"], self.eval_size or self.size
            settings["shorter"] = int(side * self.shorter / own)
        return {name: value for name, value in settings.items() if name not in given}


def find_preprocessing(backbone: str, weights: str | None) -> Preprocessing:
    """Return the preprocessing of a backbone's weights; NoPreprocessing says why there is none.

    Torchvision's is part of each of its weights, timm's of the name of the network, and a callable has it as
    an attribute `preprocessing`, a mapping of the settings above.
    """
    if backbone.startswith("timm:"):
        return _of_timm(backbone.removeprefix("timm:"), weights)
    return _of_callable(backbone) if ":" in backbone else _of_torchvision(backbone, weights)


def _of_torchvision(name: str, weights: str | None) -> Preprocessing:
    from torchvision import models

    if name not in models.list_models(module=models):
        raise NoPreprocessing(f"torchvision has no classification network {name!r}")
    published = models.get_model_weights(name)
    chosen = weights
    if weights is not None and is_file(weights):
        # A download keeps its name.
        chosen = next((one.name for one in published if one.url.endswith(f"/{Path(weights).name}")), weights)
    if chosen != "DEFAULT" and chosen not in published.__members__:
        raise NoPreprocessing(
            f"model.weights is {weights!r}, expected published weights of {name}: "
            f"{', '.join(published.__members__) or 'there are none'}"
        )
    preset: Any = published[chosen].transforms()
    return Preprocessing(
        size=preset.crop_size[0],
        shorter=preset.resize_size[0],
        interpolation=_interpolation(preset.interpolation.value, f"{name} {chosen}"),
        mean=tuple(preset.mean),
        std=tuple(preset.std),
    )


def _of_timm(name: str, weights: str | None) -> Preprocessing:
    if weights is None:
        raise NoPreprocessing(f"model.weights is not set for 'timm:{name}', expected DEFAULT or a file")
    try:
        from timm.data import resolve_data_config
        from timm.models import get_pretrained_cfg
    except ImportError:
        raise NoPreprocessing(f"'timm:{name}' needs timm, which is not installed: pip install timm") from None
    try:
        found: Any = get_pretrained_cfg(name, allow_unregistered=False)
    except RuntimeError as error:
        raise NoPreprocessing(f"timm has no weights of {name!r} ({error})") from None
    own = resolve_data_config(pretrained_cfg=found.to_dict())
    # Where timm measured the accuracies that it publishes.
    tested = resolve_data_config(pretrained_cfg=found.to_dict(), use_test_size=True)
    size, eval_size = own["input_size"][-1], tested["input_size"][-1]
    squashed = tested["crop_mode"] == "squash" and tested["crop_pct"] == 1.0
    if tested["crop_mode"] != "center" and not squashed:
        raise NoPreprocessing(
            f"timm prepares images for {name} in a way that bigscl lacks (crop mode {tested['crop_mode']}, "
            f"crop fraction {tested['crop_pct']})"
        )
    return Preprocessing(
        size=size,
        eval_size=None if eval_size == size else eval_size,
        resize="square" if squashed else "shorter",
        shorter=int(eval_size / tested["crop_pct"]),
        interpolation=_interpolation(tested["interpolation"], name),
        mean=tuple(tested["mean"]),
        std=tuple(tested["std"]),
    )


def _of_callable(path: str) -> Preprocessing:
    settings = getattr(import_callable(path), "preprocessing", None)
    if settings is None:
        raise NoPreprocessing(f"{path} has no attribute `preprocessing`, a mapping of settings of data")
    try:
        return Preprocessing(**settings)
    except TypeError as error:
        raise NoPreprocessing(
            f"{path}: its attribute `preprocessing` is no mapping of settings ({error})"
        ) from None


def _interpolation(name: str, weights: str) -> Interpolation:
    match name:
        case "bilinear" | "bicubic":
            return name
        case _:
            raise NoPreprocessing(f"{weights} resizes images by {name}, bigscl by bilinear or bicubic")
