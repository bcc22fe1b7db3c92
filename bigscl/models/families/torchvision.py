"""Torchvision's classification networks: `resnet50`."""

import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from bigscl.common.user_error import UserError
from bigscl.models.families.base import (
    WEIGHT_FILES,
    Family,
    NoPreprocessing,
    Preprocessing,
    explain_failed_download,
    is_file,
    keyword_text,
    known_interpolation,
    refuse_unknown_arguments,
)

# Of GoogLeNet and Inception: only auxiliary losses would train them.
AUXILIARY_CLASSIFIERS = ("aux1", "aux2", "AuxLogits")


class Torchvision(Family):
    """Networks that `torchvision.models.list_models()` lists."""

    prefix = ""

    def check(self, name: str) -> None:
        from torchvision import models

        if name not in (known := models.list_models(module=models)):
            near = difflib.get_close_matches(name, known, n=1)
            raise UserError(
                f"backbone: torchvision has no classification network {name!r}"
                f"{f'; did you mean {near[0]}?' if near else '.'} Use one of "
                f"torchvision.models.list_models(), 'timm:<name>', or 'package.module:callable'."
            )

    def create(self, name: str, num_classes: int, weights: str | None, args: dict[str, Any]) -> nn.Module:
        """Return the network without its auxiliary classifiers."""
        from torchvision import models

        if weights is None:
            options = {"init_weights": True} if name in ("googlenet", "inception_v3") else {}
            with refuse_unknown_arguments(name, args):
                network = models.get_model(name, num_classes=num_classes, **{**options, **args})
        else:
            published = models.get_model_weights(name)
            if weights not in [*published.__members__, "DEFAULT"]:
                raise UserError(
                    f"weights: {name} has no weights {weights!r}, only {sorted(published.__members__)}; "
                    f"a file ends in {', '.join(WEIGHT_FILES)}"
                )
            url = published[weights].url
            file = Path(torch.hub.get_dir()) / "checkpoints" / Path(url).name
            with (
                explain_failed_download(f"{weights} of {name}", url, f"as {file}"),
                refuse_unknown_arguments(name, args),
            ):
                network = models.get_model(name, weights=weights, **args)
        if getattr(network, "aux_logits", False):
            network.aux_logits = False
            for classifier in AUXILIARY_CLASSIFIERS:
                setattr(network, classifier, None)
        return cast(nn.Module, network)

    def preprocessing(self, name: str, weights: str | None) -> Preprocessing:
        from torchvision import models

        if name not in models.list_models(module=models):
            raise NoPreprocessing(f"torchvision has no classification network {name!r}")
        published = models.get_model_weights(name)
        chosen = weights
        if weights is not None and is_file(weights):
            # A download keeps its name.
            file = f"/{Path(weights).name}"
            chosen = next((member.name for member in published if member.url.endswith(file)), weights)
        if chosen != "DEFAULT" and chosen not in published.__members__:
            raise NoPreprocessing(
                f"model.weights is {weights!r}, expected published weights of {name}: "
                f"{', '.join(published.__members__) or 'there are none'}"
            )
        preset: Any = published[chosen].transforms()
        return Preprocessing(
            size=preset.crop_size[0],
            shorter=preset.resize_size[0],
            interpolation=known_interpolation(preset.interpolation.value, f"{name} {chosen}"),
            mean=tuple(preset.mean),
            std=tuple(preset.std),
        )

    def loading_code(
        self, name: str, num_classes: int, args: Mapping[str, Any], repository: str | None
    ) -> list[str]:
        options = f"num_classes={num_classes}{keyword_text(args)}"
        return [
            "import torchvision",
            "from safetensors.torch import load_file",
            f'network = torchvision.models.get_model("{name}", {options})',
            'network.load_state_dict(load_file("model.safetensors"))',
        ]


FAMILY = Torchvision()
