"""A user's own callable that returns a network: `package.module:callable`."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any, cast

from torch import nn

from bigscl.common.user_error import UserError
from bigscl.models.families.base import (
    WEIGHT_FILES,
    Family,
    NoPreprocessing,
    Preprocessing,
    keyword_text,
    refuse_unknown_arguments,
)


class Custom(Family):
    """Callables that take `num_classes` and return a network; they may have an attribute `preprocessing`."""

    prefix = "*"

    def check(self, name: str) -> None:
        make = import_callable(name)
        try:
            inspect.signature(make).bind_partial(num_classes=1)
        except TypeError as error:
            raise UserError(
                f"backbone: {name} takes no num_classes ({error}). Expected a callable that returns a "
                f"network, called with num_classes and model.args."
            ) from None
        except ValueError:
            pass  # a builtin without a signature

    def create(self, name: str, num_classes: int, weights: str | None, args: dict[str, Any]) -> nn.Module:
        if weights is not None:
            raise UserError(
                f"weights: found {weights!r} for {name}, expected a file ending in "
                f"{', '.join(WEIGHT_FILES)}: only torchvision and timm publish weights by name"
            )
        with refuse_unknown_arguments(name, args):
            network = import_callable(name)(num_classes=num_classes, **args)
        if not isinstance(network, nn.Module):
            raise UserError(
                f"backbone: {name} returned {type(network).__name__}, expected a torch.nn.Module that ends "
                f"in average pooling and a linear layer"
            )
        return network

    def preprocessing(self, name: str, weights: str | None) -> Preprocessing:
        settings = getattr(import_callable(name), "preprocessing", None)
        if settings is None:
            raise NoPreprocessing(f"{name} has no attribute `preprocessing`, a mapping of settings of data")
        try:
            return Preprocessing(**settings)
        except TypeError as error:
            raise NoPreprocessing(
                f"{name}: its attribute `preprocessing` is no mapping of settings ({error})"
            ) from None

    def loading_code(
        self, name: str, num_classes: int, args: Mapping[str, Any], repository: str | None
    ) -> list[str]:
        module, _, function = name.partition(":")
        return [
            "from safetensors.torch import load_file",
            f"from {module} import {function}",
            f"network = {function}(num_classes={num_classes}{keyword_text(args)})",
            'network.load_state_dict(load_file("model.safetensors"))',
        ]


FAMILY = Custom()


def import_callable(path: str) -> Callable[..., Any]:
    module_name, _, name = path.partition(":")
    if os.getcwd() not in sys.path:
        # `python -m` has the current directory on the path, the `bigscl` command has not.
        sys.path.append(os.getcwd())
    try:
        value = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise UserError(
            f"backbone: cannot import {path!r} ({error}). Expected 'package.module:callable', importable "
            f"from here (installed, or below the current directory or PYTHONPATH)."
        ) from None
    if not callable(value):
        raise UserError(f"backbone: {path} is {type(value).__name__}, expected a callable")
    return cast(Callable[..., Any], value)
