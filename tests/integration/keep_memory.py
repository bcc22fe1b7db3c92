"""Trains as `bigscl.train` does, and writes down what the store holds before a store in memory is gone.

python -m tests.integration.keep_memory ROWS.npz CONFIG [--section.key value ...]
"""

import sys

import numpy as np

from bigscl.processes.accelerator import parse
from bigscl.train import Trainer


def main(path: str, arguments: list[str]) -> None:
    config, resume, _ = parse(arguments)
    with Trainer(config, resume, sys.argv) as trainer:
        trainer.train()
        rows = trainer.store.read(trainer.data.train.ids())
        np.savez(path, **dict(rows.arrays()))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
