"""What a process of a launcher does when it looks at a place."""

import json
from pathlib import Path

from bigscl.preflight.environment import probe_place
from bigscl.store import StorageOptions, Transport


def look(ranks: Transport, folder: Path, same: bool) -> None:
    """One of several processes whose store is at the same path, or only seems to be."""
    place = folder / ("shared" if same else f"node-{ranks.rank}") / "store"
    problems = probe_place(str(place), StorageOptions(), ranks, patience_seconds=0.1)
    if ranks.rank == 0:
        (folder / "problems.json").write_text(json.dumps(problems))
    else:
        assert problems is None
