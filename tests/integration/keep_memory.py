"""Trains as `bigscl.train` does, and writes down what the store holds before a store in memory is gone.

python -m tests.integration.keep_memory ROWS.npz CONFIG [--section.key value ...]
"""

import sys
from pathlib import Path

import numpy as np

from bigscl.config import load_config
from bigscl.train import Trainer


def main(path: str, arguments: list[str]) -> None:
    config = load_config(Path(arguments[0]), arguments[1:])
    with Trainer(config, "auto", sys.argv) as trainer:
        trainer.train()
        rows = trainer.memory.store.read(trainer.data.train.ids())
        np.savez(path, **dict(rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
