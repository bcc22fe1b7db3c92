"""Trains as `bigscl.train` does, but only rank 0 can list folders and read visit stamps.

On a shared file system the listing of another node may be old: no other rank may depend on one.
"""

import os
import sys

from bigscl.store.reader import StoreReader
from bigscl.store.snapshots import SnapshotLog
from bigscl.train import main
from bigscl.training.checkpoint_folder import Checkpoints


def refuse(*arguments: object) -> None:
    raise AssertionError("a rank other than 0 lists a folder, or reads the stamps of all shards")


if __name__ == "__main__":
    if os.environ["RANK"] != "0":
        SnapshotLog.ids = refuse  # type: ignore[assignment, method-assign]
        Checkpoints.paths = refuse  # type: ignore[assignment, method-assign]
        StoreReader.last_epochs = refuse  # type: ignore[assignment, method-assign]
    sys.exit(main(sys.argv[1:]))
