"""The interface of a family of networks, and the preprocessing that published weights were trained with."""

import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bigscl.common.digests import check_beside
from bigscl.common.files import BadFile, parse_errors
from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.data.transforms import MEAN, STD, EvaluationTransform, Interpolation, Resize

logger = logging.getLogger(__name__)

# Libraries whose errors mean that published weights could not be downloaded.
DOWNLOADERS = {"urllib", "http", "requests", "httpx", "httpcore", "huggingface_hub"}
LONGEST_REASON = 200
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


def known_interpolation(name: str, weights: str) -> Interpolation:
    """Return the name of an interpolation that bigscl has; NoPreprocessing for another."""
    match name:
        case "bilinear" | "bicubic":
            return name
        case _:
            raise NoPreprocessing(f"{weights} resizes images by {name}, bigscl by bilinear or bicubic")


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedModel:
    """A trained network and the preprocessing of its images, as `bigscl publish` writes them."""

    name: str
    """Name of the network within its family."""
    args: Mapping[str, Any]
    class_names: Sequence[str]
    num_features: int
    """Number of inputs of the linear layer."""
    transform: EvaluationTransform
    mean: Color
    std: Color


class Family(ABC):
    """Networks of one origin. A module of this folder with an object FAMILY is all that a family needs.

    Names that the methods get are those after the prefix: `resnet50` for `timm:resnet50`.
    """

    prefix: ClassVar[str]
    """Word before the colon in `model.backbone`. Empty: names without a colon; "*": all other names."""
    library_name: ClassVar[str] = "bigscl"
    """Library that loads the published files, as the Hugging Face hub names it."""

    @abstractmethod
    def check(self, name: str) -> None:
        """Raise UserError if there is no such network."""

    @abstractmethod
    def create(self, name: str, num_classes: int, weights: str | None, args: dict[str, Any]) -> nn.Module:
        """Return the network, with the published weights of that name, or untrained with `num_classes`."""

    @abstractmethod
    def preprocessing(self, name: str, weights: str | None) -> Preprocessing:
        """Return the preprocessing of the weights; NoPreprocessing says why there is none."""

    @abstractmethod
    def loading_code(
        self, name: str, num_classes: int, args: Mapping[str, Any], repository: str | None
    ) -> list[str]:
        """Return lines of Python that load published files, for the model card."""

    def config_file(self, model: PublishedModel) -> dict[str, Any] | None:
        """Return the content of the `config.json` that the family's library loads; None: it has none."""
        return None

    def convert_sync_batchnorm(self, network: nn.Module) -> bool:
        """Replace batch normalisation by SyncBatchNorm if only the family's library can; return whether."""
        return False


def keyword_text(args: Mapping[str, Any]) -> str:
    """Return `, name=value` for each keyword argument, for loading code."""
    return "".join(f", {name}={value!r}" for name, value in args.items())


@contextmanager
def refuse_unknown_arguments(backbone: str, args: Mapping[str, Any]) -> Iterator[None]:
    """Name the argument that a network does not take; other errors are those of its code."""
    try:
        yield
    except TypeError as error:
        unknown = [name for name in args if f"unexpected keyword argument '{name}'" in str(error)]
        if not unknown:
            raise
        raise UserError(f"model.args: {backbone} takes no {unknown[0]!r} ({error})") from None


@contextmanager
def explain_failed_download(weights: str, source: str, target: str) -> Iterator[None]:
    """Turn the many errors of a download that fails into one line that says what to do."""
    try:
        yield
    except Exception as error:
        if not _is_of_a_download(error):
            raise
        reason = printable(" ".join(str(error).split()))[:LONGEST_REASON]
        raise UserError(
            f"weights: {weights} cannot be downloaded from {source} ({type(error).__name__}: {reason}). "
            f"Download them where there is a network and put them here {target}, or give a file of weights "
            f"({', '.join(WEIGHT_FILES)})."
        ) from None


def _is_of_a_download(error: Exception) -> bool:
    libraries = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    damaged = isinstance(error, RuntimeError) and "invalid hash value" in str(error)
    return damaged or isinstance(error, OSError) or bool(libraries & DOWNLOADERS)


# Weights in files: state dicts that are read without running code, and load strictly

WEIGHT_FILES = (".pt", ".pth", ".safetensors")


def is_file(weights: str) -> bool:
    return Path(weights).suffix in WEIGHT_FILES


def read_state(file: str) -> dict[str, Tensor]:
    """Return the state dict in a weights file; a torch file is read without running code in it."""
    if not Path(file).is_file():
        raise FileNotFoundError(
            f"weights: no file {file}. Give a file (.pt, .pth, .safetensors) or a name as DEFAULT."
        )
    check_beside(Path(file), "Restore it from a copy, or give other weights.")
    with parse_errors(file, "a weights file of tensors", "Give model.weights another file."):
        content = _load(file)
    # Training scripts wrap the state dict: torchvision under "model", Lightning and timm under "state_dict".
    for key in ("state_dict", "model"):
        if isinstance(content, dict) and isinstance(content.get(key), dict):
            content = content[key]
    if not isinstance(content, dict) or not all(
        isinstance(name, str) and isinstance(value, Tensor) for name, value in content.items()
    ):
        raise BadFile(f"weights: {file} holds no state dict (names and tensors)")
    return content


def _load(file: str) -> Any:
    if file.endswith(".safetensors"):
        from safetensors.torch import load_file

        return load_file(file)
    with warnings.catch_warnings():
        # About unusual tensors, which are refused later if they do not fit.
        warnings.simplefilter("ignore")
        return torch.load(file, map_location="cpu", weights_only=True)


def load_state(network: nn.Module, state: dict[str, Tensor], head: str, source: str) -> None:
    """Load `state` into `network`, strictly; only a head with another number of classes stays as it is."""
    expected = network.state_dict()
    names = [name for name in (f"{head}.weight", f"{head}.bias") if name in state]
    rows = {name: state[name].shape[0] if state[name].ndim else 0 for name in names}
    linear = rows.get(f"{head}.weight")
    wanted = len(expected[f"{head}.weight"])
    if linear is not None and linear != wanted:
        logger.info("%s: head %s has %d classes, not %d: freshly initialised", source, head, linear, wanted)
        for name in rows:
            state[name] = expected[name]
    try:
        network.load_state_dict(state, strict=True)
    except (RuntimeError, TypeError, NotImplementedError):
        raise BadFile(
            f"weights: {source} does not fit {type(network).__name__}: {differences(state, expected)}. "
            f"Only the head ({head}) may differ, in its number of classes."
        ) from None


def differences(state: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str:
    """Return why a state dict does not fit, in one line with a few names of each kind; empty if it fits."""
    common = [name for name in expected if name in state]
    kinds = {
        "missing": [name for name in expected if name not in state],
        "unexpected": [name for name in state if name not in expected],
        "of another shape": [name for name in common if state[name].shape != expected[name].shape],
    }
    return "; ".join(
        f"{len(names)} {kind} ({', '.join(map(printable, names[:3]))}{', ...' if len(names) > 3 else ''})"
        for kind, names in kinds.items()
        if names
    )
