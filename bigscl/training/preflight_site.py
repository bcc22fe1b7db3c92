"""Where a rehearsal writes: beside the run, on the same storage, and removed in the end."""

import logging
import shutil
import time
from contextlib import suppress
from pathlib import Path

from bigscl.config import Config
from bigscl.store import open_backend

logger = logging.getLogger(__name__)

PATIENCE_SECONDS = 10.0
"""How long the removal of the folder is tried while other threads and ranks may still write into it."""


class Site:
    """A folder beside that of the run, on the same storage, and a place beside the run's store."""

    def __init__(self, config: Config, token: str) -> None:
        self._options = config.store.options()
        self.folder = config.run.with_name(f"{config.run.name}.preflight-{token}")
        url = config.store.url if config.store.kind == "disk" else None
        self.store_place = None if url is None else f"{url.rstrip('/')}.preflight-{token}"
        self._missing = [one for place in (str(self.folder), url or "") for one in _missing_parents(place)]

    @property
    def place(self) -> str:
        """Where the store of the rehearsal is."""
        return self.store_place or str(self.folder)

    def remove(self) -> None:
        """Remove all of it; repeatedly, if something is still being written."""
        deadline = time.monotonic() + PATIENCE_SECONDS
        while True:
            shutil.rmtree(self.folder, ignore_errors=True)
            if self.store_place is not None:
                with suppress(Exception):  # an error of the storage was reported by the run itself
                    open_backend(self.store_place, self._options).delete_tree("")
            if not self.folder.exists():
                break
            if time.monotonic() > deadline:
                logger.warning("%s: could not be removed. Delete it by hand.", self.folder)
                return
            time.sleep(0.1)
        for parent in self._missing:
            with suppress(OSError):  # not empty: others use it meanwhile
                parent.rmdir()


def _missing_parents(place: str) -> list[Path]:
    """Return the folders that must be created for a local path, the innermost first."""
    return [] if "://" in place else [one for one in Path(place).absolute().parents if not one.exists()]
