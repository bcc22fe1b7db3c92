"""Create networks by name, with their weights: torchvision's, timm's, or a user's callable."""

import importlib
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from bigscl.digests import check_beside
from bigscl.files import BadFile, parse_errors
from bigscl.text import printable
from bigscl.user_error import UserError

logger = logging.getLogger(__name__)

WEIGHT_FILES = (".pt", ".pth", ".safetensors")
# Of GoogLeNet and Inception: only auxiliary losses would train them.
AUXILIARY_CLASSIFIERS = ("aux1", "aux2", "AuxLogits")
RESERVED_ARGUMENTS = {"num_classes", "weights", "pretrained"}


# Libraries whose errors mean that published weights could not be downloaded.
DOWNLOADERS = {"urllib", "http", "requests", "httpx", "httpcore", "huggingface_hub"}
LONGEST_REASON = 200


def create_network(
    backbone: str, num_classes: int, weights: str | None = None, args: Mapping[str, Any] | None = None
) -> nn.Module:
    """Create the network that `backbone` names, with `num_classes` outputs unless `weights` is a name.

    Published weights have the library's own number of classes: the caller replaces the head. Weights from a
    file are not loaded here (see `read_state`), because that requires knowing which layer is the head.
    `args` are further keyword arguments of the network.
    """
    if num_classes < 1:
        raise UserError(f"num_classes: found {num_classes}, expected at least 1")
    named = weights if weights is not None and not is_file(weights) else None
    args = dict(args or {})
    check_backbone(backbone)
    if reserved := sorted(RESERVED_ARGUMENTS & args.keys()):
        raise UserError(
            f"model.args: {', '.join(reserved)}: the data and model.weights decide that. Remove it."
        )
    if backbone.startswith("timm:"):
        return _from_timm(backbone.removeprefix("timm:"), num_classes, named, args)
    if ":" in backbone:
        return _from_callable(backbone, num_classes, named, args)
    return _from_torchvision(backbone, num_classes, named, args)


def check_backbone(backbone: str) -> None:
    """Refuse a name that no network has, and a callable that makes none."""
    library, colon, name = backbone.partition(":")
    if library == "timm":
        try:
            import timm
        except ImportError:
            raise UserError(
                f"backbone: '{backbone}' needs timm, which is not installed: pip install timm"
            ) from None
        if not timm.is_model(name):
            raise UserError(f"backbone: timm has no network {name!r}; see timm.list_models()")
    elif colon:
        _check_callable(backbone, import_callable(backbone))
    else:
        from torchvision import models

        if backbone not in models.list_models(module=models):
            raise UserError(
                f"backbone: torchvision has no classification network {backbone!r}. Use one of "
                f"torchvision.models.list_models(), 'timm:<name>', or 'package.module:callable'."
            )


def _check_callable(path: str, make: Callable[..., Any]) -> None:
    try:
        inspect.signature(make).bind_partial(num_classes=1)
    except TypeError as error:
        raise UserError(
            f"backbone: {path} takes no num_classes ({error}). Expected a callable that returns a network, "
            f"called with num_classes and model.args."
        ) from None
    except ValueError:
        pass  # a builtin without a signature


@contextmanager
def _taking(backbone: str, args: Mapping[str, Any]) -> Iterator[None]:
    """Say in words which argument a network does not take; other errors are those of its code."""
    try:
        yield
    except TypeError as error:
        unknown = [name for name in args if f"unexpected keyword argument '{name}'" in str(error)]
        if not unknown:
            raise
        raise UserError(f"model.args: {backbone} takes no {unknown[0]!r} ({error})") from None


def is_file(weights: str) -> bool:
    """Return whether `weights` is a file rather than the name of published weights."""
    return Path(weights).suffix in WEIGHT_FILES


def _from_torchvision(name: str, num_classes: int, weights: str | None, args: dict[str, Any]) -> nn.Module:
    from torchvision import models

    if weights is None:
        options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
        with _taking(name, args):
            network = models.get_model(name, num_classes=num_classes, **{**options, **args})
    else:
        published = models.get_model_weights(name)
        if weights not in [*published.__members__, "DEFAULT"]:
            raise UserError(
                f"weights: {name} has no weights {weights!r}, only {sorted(published.__members__)}; "
                f"a file ends in {', '.join(WEIGHT_FILES)}"
            )
        member = published[weights]
        place = Path(torch.hub.get_dir()) / "checkpoints" / Path(member.url).name
        with _downloading(f"{weights} of {name}", member.url, f"as {place}"), _taking(name, args):
            network = models.get_model(name, weights=weights, **args)
    if getattr(network, "aux_logits", False):
        network.aux_logits = False
        for classifier in AUXILIARY_CLASSIFIERS:
            setattr(network, classifier, None)
    return cast(nn.Module, network)


def _from_timm(name: str, num_classes: int, weights: str | None, args: dict[str, Any]) -> nn.Module:
    import timm

    if weights not in (None, "DEFAULT"):
        raise UserError(
            f"weights: found {weights!r} for 'timm:{name}', expected DEFAULT or a file; timm names other "
            f"weights in the backbone, as in 'timm:resnet50.a1_in1k'"
        )
    options: dict[str, Any] = {"num_classes": num_classes} if weights is None else {"pretrained": True}
    published = timm.get_pretrained_cfg(name)
    hub = getattr(published, "hf_hub_id", None)
    source = f"https://huggingface.co/{hub}" if hub else str(getattr(published, "url", "its publisher"))
    place = "in the cache that HF_HOME names"
    with _downloading(f"those of timm:{name}", source, place), _taking(f"timm:{name}", args):
        network: nn.Module = timm.create_model(name, **options, **args)
    return network


@contextmanager
def _downloading(what: str, source: str, place: str) -> Iterator[None]:
    """Turn the many errors of a download that fails into one line that says what to do."""
    try:
        yield
    except Exception as error:
        if not _is_of_a_download(error):
            raise
        reason = printable(" ".join(str(error).split()))[:LONGEST_REASON]
        raise UserError(
            f"weights: {what} cannot be downloaded from {source} ({type(error).__name__}: {reason}). "
            f"Download them where there is a network and put them here {place}, or give a file of weights "
            f"({', '.join(WEIGHT_FILES)})."
        ) from None


def _is_of_a_download(error: Exception) -> bool:
    libraries = {kind.__module__.split(".")[0] for kind in type(error).__mro__}
    damaged = isinstance(error, RuntimeError) and "invalid hash value" in str(error)
    return damaged or isinstance(error, OSError) or bool(libraries & DOWNLOADERS)


def _from_callable(path: str, num_classes: int, weights: str | None, args: dict[str, Any]) -> nn.Module:
    if weights is not None:
        raise UserError(
            f"weights: found {weights!r} for {path}, expected a file ending in {', '.join(WEIGHT_FILES)}: "
            f"only torchvision and timm publish weights by name"
        )
    with _taking(path, args):
        network = import_callable(path)(num_classes=num_classes, **args)
    if not isinstance(network, nn.Module):
        raise UserError(
            f"backbone: {path} returned {type(network).__name__}, expected a torch.nn.Module that ends in "
            f"average pooling and a linear layer"
        )
    return network


def import_callable(path: str) -> Callable[..., Any]:
    """Return what `package.module:callable` names."""
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        # `python -m` has the current directory on the path, the `bigscl` command has not.
        sys.path.append(os.getcwd())
    try:
        found = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"backbone: cannot import {path!r} ({error}). Expected 'package.module:callable', importable "
            f"from here (installed, or below the current directory or PYTHONPATH)."
        ) from None
    if not callable(found):
        raise UserError(f"backbone: {path} is {type(found).__name__}, expected a callable")
    return cast(Callable[..., Any], found)


def read_state(file: str) -> dict[str, Tensor]:
    """Return the state dict in a weights file; a torch file is read without running code in it."""
    if not Path(file).is_file():
        raise FileNotFoundError(f"weights: no file {file}")
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
    found = rows.get(f"{head}.weight")
    wanted = len(expected[f"{head}.weight"])
    if found is not None and found != wanted:
        logger.info("%s: head %s has %d classes, not %d: freshly initialised", source, head, found, wanted)
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
