"""Batch normalisation over the batches of all ranks."""

import torch
from torch import Tensor, nn

from bigscl.common.user_error import UserError
from bigscl.models.families import FAMILIES

TOLERANCE = 1e-5


def synchronize_batchnorm(network: nn.Module, size: int) -> None:
    """Replace the batch normalisation layers of a network by SyncBatchNorm, in place.

    Raises UserError if the network would compute something else then, as happens to layers of its own that
    are derived from batch normalisation and do more.
    """
    images = torch.rand(1, 3, size, size, device=next(network.parameters()).device)
    before = _evaluated(network, images)
    if not any(family.convert_sync_batchnorm(network) for family in FAMILIES.values()):
        nn.SyncBatchNorm.convert_sync_batchnorm(network)  # type: ignore[no-untyped-call]
    for module in network.modules():
        if isinstance(module, nn.SyncBatchNorm):
            module.register_forward_pre_hook(_in_float32_if_empty)
    after = _evaluated(network, images)
    if not torch.allclose(before, after, rtol=TOLERANCE, atol=TOLERANCE):
        raise UserError(
            f"hardware.sync_batchnorm: this network's logits change by up to "
            f"{(before - after).abs().max():.3g} when its layers are replaced by torch's SyncBatchNorm, so "
            f"some of them do more than normalise. Train it with sync_batchnorm: false."
        )


def _in_float32_if_empty(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Make a rank without images send statistics of the same type as the others.

    Under autocast its empty images are in half precision, and torch takes the type of the images then; of
    images that are there, the statistics are always in float32.
    """
    (images,) = inputs
    return (images if len(images) else images.float(),)


@torch.no_grad()
def _evaluated(network: nn.Module, images: Tensor) -> Tensor:
    """The logits of some images in evaluation mode."""
    modes = {module: module.training for module in network.modules()}
    prediction = network.eval()(images)
    for module, training in modes.items():
        module.training = training
    logits = getattr(prediction, "logits", prediction)
    assert isinstance(logits, Tensor)
    return logits
