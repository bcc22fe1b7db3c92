"""The trainer, until every rank kills itself before the second step of an epoch.

python -m tests.pairs.killed EPOCH CONFIG ...
"""

import os
import signal
import sys
from typing import Any

from bigscl.train import Trainer, main


def train(epoch: str, *arguments: str) -> int:
    """Train until the middle of that epoch."""
    make_step, calls = Trainer.train_step, 0

    def step_or_die(self: Trainer, *given: Any) -> None:
        nonlocal calls
        calls += self.progress.epoch == int(epoch)
        if calls == 2:
            self.folder.path.with_suffix(f".killed-{epoch}-{self.ranks.rank}").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        make_step(self, *given)

    Trainer.train_step = step_or_die  # type: ignore[method-assign]
    sys.argv = ["bigscl.train", *arguments]
    return main(list(arguments))


if __name__ == "__main__":
    sys.exit(train(*sys.argv[1:]))
