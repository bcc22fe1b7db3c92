"""Train a classifier from a config, or resume it."""

from bigscl.training.options import TrainingOptions


def command(options: TrainingOptions) -> int:
    """Import the trainer, and with it torch, only when training starts."""
    from bigscl.train import train

    return train(options)
