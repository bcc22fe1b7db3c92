"""Trains as `bigscl.train` does, and writes down the statistics that each rank would validate with.

python -m tests.integration.keep_statistics FOLDER CONFIG [--section.key value ...]
"""

import sys
from pathlib import Path

from safetensors.torch import save_file

from bigscl.config import load_config
from bigscl.train import Trainer


def main(folder: str, arguments: list[str]) -> None:
    config = load_config(Path(arguments[0]), arguments[1:])
    with Trainer(config, "auto", sys.argv) as trainer:
        trainer.train()
        trainer.state.share_buffers()
        buffers = dict(trainer.state.evaluated.named_buffers())
        save_file(buffers, Path(folder, f"{trainer.ranks.rank}.safetensors"))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
