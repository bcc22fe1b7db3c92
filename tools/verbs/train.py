"""Train a classifier from a config, or resume it."""

from bigscl.training.options import TrainingOptions


def command(options: TrainingOptions) -> int:
    from bigscl.train import train

    return train(options)
