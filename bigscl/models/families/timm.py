"""Timm's networks: `timm:resnet50.a1_in1k`."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from bigscl.common.user_error import UserError
from bigscl.models.families.base import (
    Family,
    NoPreprocessing,
    Preprocessing,
    PublishedModel,
    explain_failed_download,
    known_interpolation,
    refuse_unknown_arguments,
)


class Timm(Family):
    """Networks that `timm.list_models()` lists."""

    prefix = "timm"
    library_name = "timm"

    def check(self, name: str) -> None:
        try:
            import timm
        except ImportError:
            raise UserError(
                f"backbone: 'timm:{name}' needs timm, which is not installed: pip install timm"
            ) from None
        if not timm.is_model(name):
            raise UserError(f"backbone: timm has no network {name!r}; see timm.list_models()")

    def create(self, name: str, num_classes: int, weights: str | None, args: dict[str, Any]) -> nn.Module:
        """Return the network; the name decides which weights are its DEFAULT."""
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
        cache = "in the cache that HF_HOME names"
        with (
            explain_failed_download(f"those of timm:{name}", source, cache),
            refuse_unknown_arguments(f"timm:{name}", args),
        ):
            network: nn.Module = timm.create_model(name, **options, **args)
        return network

    def preprocessing(self, name: str, weights: str | None) -> Preprocessing:
        if weights is None:
            raise NoPreprocessing(f"model.weights is not set for 'timm:{name}', expected DEFAULT or a file")
        try:
            from timm.data import resolve_data_config
            from timm.models import get_pretrained_cfg
        except ImportError:
            raise NoPreprocessing(
                f"'timm:{name}' needs timm, which is not installed: pip install timm"
            ) from None
        try:
            published: Any = get_pretrained_cfg(name, allow_unregistered=False)
        except RuntimeError as error:
            raise NoPreprocessing(f"timm has no weights of {name!r} ({error})") from None
        own = resolve_data_config(pretrained_cfg=published.to_dict())
        # Where timm measured the accuracies that it publishes.
        tested = resolve_data_config(pretrained_cfg=published.to_dict(), use_test_size=True)
        size, eval_size = own["input_size"][-1], tested["input_size"][-1]
        squashed = tested["crop_mode"] == "squash" and tested["crop_pct"] == 1.0
        if tested["crop_mode"] != "center" and not squashed:
            raise NoPreprocessing(
                f"timm prepares images for {name} in a way that bigscl lacks (crop mode "
                f"{tested['crop_mode']}, crop fraction {tested['crop_pct']})"
            )
        return Preprocessing(
            size=size,
            eval_size=None if eval_size == size else eval_size,
            resize="square" if squashed else "shorter",
            shorter=int(eval_size / tested["crop_pct"]),
            interpolation=known_interpolation(tested["interpolation"], name),
            mean=tuple(tested["mean"]),
            std=tuple(tested["std"]),
        )

    def loading_code(
        self, name: str, num_classes: int, args: Mapping[str, Any], repository: str | None
    ) -> list[str]:
        source = "local-dir:." if repository is None else f"hf-hub:{repository}"
        return ["import timm", f'network = timm.create_model("{source}", pretrained=True)']

    def config_file(self, model: PublishedModel) -> dict[str, Any]:
        transform = model.transform
        return {
            "architecture": model.name.partition(".")[0],
            "num_classes": len(model.class_names),
            "num_features": model.num_features,
            "model_args": dict(model.args),
            "label_names": list(model.class_names),
            "pretrained_cfg": {
                "input_size": [3, transform.size, transform.size],
                "interpolation": transform.interpolation,
                "crop_pct": 1.0 if transform.resize == "square" else transform.size / transform.shorter,
                "crop_mode": "squash" if transform.resize == "square" else "center",
                "mean": list(model.mean),
                "std": list(model.std),
                "num_classes": len(model.class_names),
            },
        }

    def convert_sync_batchnorm(self, network: nn.Module) -> bool:
        """Convert timm's layers, which also apply an activation; torch's converter would drop it."""
        if not any(type(module).__module__.startswith("timm.") for module in network.modules()):
            return False
        from timm.layers import convert_sync_batchnorm

        convert_sync_batchnorm(network)
        return True


FAMILY = Timm()
