"""A request to stop that needs no signal: a file in the run's folder, which rank 0 looks for."""

import time
from pathlib import Path

from bigscl.common.files import write_text

NAME = "stop"
LARGEST_SHARE = 0.01
"""Of the time of a run that may be spent on looking: a shared file system takes milliseconds for a look."""


class StopFile:
    """The request of `bigscl stop`, as the run sees it."""

    def __init__(self, run: Path) -> None:
        self.path = run / NAME
        self._next_look = 0.0

    def request(self) -> None:
        """Ask the run to finish its step, save, and exit."""
        write_text(self.path, time.strftime("asked to stop at %Y-%m-%d %H:%M:%S UTC\n", time.gmtime()))

    def is_requested(self) -> bool:
        """Whether somebody asked, as of the last look."""
        began = time.monotonic()
        if began < self._next_look:
            return False
        found = self.path.exists()
        ended = time.monotonic()
        self._next_look = ended + (ended - began) / LARGEST_SHARE
        return found

    def clear(self) -> None:
        """Remove a request that was met, or that an earlier run has left."""
        self.path.unlink(missing_ok=True)
