"""Whether all processes of a run see the same place, and may write there."""

import contextlib
import json
import time
import uuid
from pathlib import Path
from typing import Any

from store import StorageOptions, StoreError
from store.backends import open_backend
from store.transport import Transport

# A network file system may show a new file to other nodes only after a moment.
PATIENCE_SECONDS = 10.0


def probe_place(place: str, options: StorageOptions, ranks: Transport) -> list[str] | None:
    """What is wrong with a place, on rank 0 (None elsewhere): every process writes there, and all read it.

    Nothing is left behind, neither files nor folders that were not there before.
    """
    token = ranks.broadcast(uuid.uuid4().hex.encode() if ranks.rank == 0 else None).decode()
    missing = _missing_folders(place)
    _wait_for_all(ranks)
    written = _write(place, options, _key(token, ranks.rank), token)
    _wait_for_all(ranks)
    seen = [_read(place, options, _key(token, rank), token) for rank in range(ranks.world_size)]
    reports = ranks.gather(json.dumps({"written": written, "seen": seen}).encode())
    _wait_for_all(ranks)
    with contextlib.suppress(Exception):  # whoever could not write there cannot delete there
        open_backend(place, options).delete(_key(token, ranks.rank))
    _wait_for_all(ranks)
    with contextlib.suppress(OSError):  # of the ranks on one node, the first removes it
        for folder in missing:
            folder.rmdir()
    return None if reports is None else _problems(place, [json.loads(report) for report in reports])


def _wait_for_all(ranks: Transport) -> None:
    """Return when every process has come here."""
    ranks.gather(b"")
    ranks.broadcast(b"" if ranks.rank == 0 else None)


def _key(token: str, rank: int) -> str:
    return f"bigscl-doctor-{token}-{rank}"


def _write(place: str, options: StorageOptions, key: str, token: str) -> str | None:
    """Why this process cannot write there; None if it can."""
    try:
        open_backend(place, options).create(key, token.encode())
    except (StoreError, OSError) as error:
        return str(error)
    except Exception as error:  # an object store raises what its client library likes
        return f"{type(error).__name__}: {error}"
    return None


def _read(place: str, options: StorageOptions, key: str, token: str) -> bool:
    """Whether this process sees what another wrote."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            if open_backend(place, options).read(key) == token.encode():
                return True
        except Exception:  # an unreachable place has been reported by whoever tried to write there
            return False
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def _missing_folders(place: str) -> list[Path]:
    """The folders that writing will make, the innermost first."""
    if "://" in place:
        return []
    path = Path(place).absolute()
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _problems(place: str, reports: list[dict[str, Any]]) -> list[str]:
    problems = []
    for rank, report in enumerate(reports):
        if report["written"] is not None:
            problems.append(f"rank {rank} cannot write to {place}: {report['written']}")
    able = [rank for rank, report in enumerate(reports) if report["written"] is None]
    for rank, report in enumerate(reports):
        unseen = [other for other in able if not report["seen"][other]]
        if unseen:
            problems.append(
                f"rank {rank} does not see what ranks {unseen} wrote to {place}: it is not the same "
                f"place there. Use a shared file system or an object store."
            )
    return problems
