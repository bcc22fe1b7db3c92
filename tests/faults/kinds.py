"""What a storage operation is for: by its path, and by who asked for it."""

import sys
import threading
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).parent.parent.parent
PACKAGE = f"{ROOT / 'bigscl'}/"

# The first kind with a function on the stack, or a part of the path, wins.
FUNCTIONS = {
    "lease": {"acquire", "release", "_beat"},
    "create": {"create_store"},
    "compaction": {"compact", "_compact"},
    "drop": {"drop_snapshots", "delete_unnamed_groups"},
    "rollback": {"roll_back", "rollback", "claim", "prepare_writing"},
}
PATHS = {
    "history": ("history",),
    "checkpoint": ("checkpoints",),
    "commit": ("snapshots",),
    "shard": ("arrays-",),
    "metrics": ("metrics.jsonl",),
    "ids": ("ids-",),
    "start": ("config.yaml", "run.json", "environment.jsonl"),
}


def callers() -> list[str]:
    """`file:function:line` of the project's frames, innermost first: of this thread, then of the main one.

    Chunks are written by threads of Zarr's, whose own stack does not say what for.
    """
    frames: list[FrameType | None] = [sys._getframe(1)]
    if threading.current_thread() is not threading.main_thread():
        frames.append(sys._current_frames().get(threading.main_thread().ident or 0))
    found = []
    for frame in frames:
        while frame is not None:
            if frame.f_code.co_filename.startswith(PACKAGE):
                file = str(Path(frame.f_code.co_filename).relative_to(ROOT))
                found.append(f"{file}:{frame.f_code.co_name}:{frame.f_lineno}")
            frame = frame.f_back
    return found


def kind_of(operation: str, path: str, stack: list[str]) -> str:
    """One of the kinds above, or `other`."""
    if "lease.json" in path:
        return "lease"
    functions = {line.split(":")[1] for line in stack}
    for kind, names in FUNCTIONS.items():
        if functions & names:
            return kind
    if operation in ("fsync", "fdatasync") and "arrays-" in path:
        return "commit"
    for kind, parts in PATHS.items():
        if any(part in path for part in parts):
            return kind
    return "other"
