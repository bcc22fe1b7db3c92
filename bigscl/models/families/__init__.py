"""Create networks by name: each module here is a family of them, found by its object FAMILY."""

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from torch import nn

from bigscl.common.user_error import UserError
from bigscl.models.families.base import Family, NoPreprocessing, Preprocessing, PublishedModel, is_file

RESERVED_ARGUMENTS = {"num_classes", "weights", "pretrained"}


def _families() -> dict[str, Family]:
    modules = [importlib.import_module(f"{__name__}.{info.name}") for info in pkgutil.iter_modules(__path__)]
    return {module.FAMILY.prefix: module.FAMILY for module in modules if hasattr(module, "FAMILY")}


FAMILIES = _families()


def family_of(backbone: str) -> tuple[Family, str]:
    prefix, colon, name = backbone.partition(":")
    if not colon:
        return FAMILIES[""], backbone
    return (FAMILIES[prefix], name) if prefix in FAMILIES else (FAMILIES["*"], backbone)


def check_backbone(backbone: str) -> None:
    """Refuse a name that no network has, and a callable that makes none."""
    family, name = family_of(backbone)
    family.check(name)


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
    published = weights if weights is not None and not is_file(weights) else None
    check_backbone(backbone)
    if reserved := sorted(RESERVED_ARGUMENTS & (args or {}).keys()):
        raise UserError(
            f"model.args: {', '.join(reserved)}: the data and model.weights decide that. Remove it."
        )
    family, name = family_of(backbone)
    return family.create(name, num_classes, published, dict(args or {}))


def find_preprocessing(backbone: str, weights: str | None) -> Preprocessing:
    """Return the preprocessing of a backbone's weights; NoPreprocessing says why there is none.

    Torchvision's is part of each of its weights, timm's of the name of the network, and a callable has it as
    an attribute `preprocessing`, a mapping of the settings of `Preprocessing`.
    """
    family, name = family_of(backbone)
    return family.preprocessing(name, weights)
