"""Check that all processes of a run see the same place and can write to it."""

import contextlib
import json
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bigscl.store import StorageOptions, StoreError, Transport, check_creates_once, open_backend

# A network file system may show a new file to other nodes only after some seconds.
PATIENCE_SECONDS = 10.0


def probe_place(
    place: str, options: StorageOptions, ranks: Transport, *, patience_seconds: float = PATIENCE_SECONDS
) -> list[str] | None:
    """Return what is wrong with a place, on rank 0 (None elsewhere).

    Every process creates a file there and all read it; every process renames another file over its own and
    all read it again. Files and folders made for this are deleted again.
    """
    token = ranks.broadcast(uuid.uuid4().hex.encode() if ranks.rank == 0 else None).decode()
    missing = _missing_folders(place)
    _wait_for_all(ranks)

    def without(content: bytes, from_ranks: list[int]) -> list[int]:
        """Return the ranks whose file does not get this content before long."""
        deadline = time.monotonic() + patience_seconds
        keys = {rank: _key(token, rank) for rank in from_ranks}
        return [rank for rank, key in keys.items() if not _sees(place, options, key, content, deadline)]

    old, new = f"{token} old".encode(), f"{token} new".encode()
    failures = _shared(ranks, _write(place, options, _key(token, ranks.rank), old))
    unseen = without(old, _able(failures))
    all_unseen = _shared(ranks, unseen)
    if failures[ranks.rank] is None:
        failures[ranks.rank] = _write(place, options, _key(token, ranks.rank), new, over=True)
    failures = _shared(ranks, failures[ranks.rank])
    all_stale = _shared(ranks, without(new, [rank for rank in _able(failures) if rank not in unseen]))
    with contextlib.suppress(Exception):  # without permission to write there is none to delete
        open_backend(place, options).delete(_key(token, ranks.rank))
    _wait_for_all(ranks)
    with contextlib.suppress(OSError):  # the first rank of a node deletes it
        for folder in missing:
            folder.rmdir()
    return list(_problems(place, failures, all_unseen, all_stale)) if ranks.rank == 0 else None


def _shared(ranks: Transport, mine: Any) -> list[Any]:
    """Return the values of all ranks in rank order, on every rank."""
    payloads = ranks.gather(json.dumps(mine).encode())
    values = None if payloads is None else json.dumps([json.loads(payload) for payload in payloads]).encode()
    shared: list[Any] = json.loads(ranks.broadcast(values))
    return shared


def _wait_for_all(ranks: Transport) -> None:
    """Return when every process has called this."""
    _shared(ranks, None)


def _key(token: str, rank: int) -> str:
    return f"bigscl-preflight-{token}-{rank}"


def _able(failures: list[str | None]) -> list[int]:
    return [rank for rank, failure in enumerate(failures) if failure is None]


def _write(
    place: str, options: StorageOptions, key: str, content: bytes, *, over: bool = False
) -> str | None:
    """Return why this process cannot create a file there, or rename one over it; None if it can."""
    try:
        backend = open_backend(place, options)
        if over:
            backend.replace(key, content)
        else:
            check_creates_once(backend)
            backend.create(key, content)
    except (StoreError, OSError) as error:
        return str(error)
    except Exception as error:  # the errors of object stores have no common type
        return f"{type(error).__name__}: {error}"
    return None


def _sees(place: str, options: StorageOptions, key: str, content: bytes, deadline: float) -> bool:
    """Return whether this process sees what another one wrote."""
    while True:
        try:
            if open_backend(place, options).read(key) == content:
                return True
        except Exception:  # reported already by the process that tried to write there
            return False
        if time.monotonic() > deadline:
            return False
        time.sleep(0.5)


def _missing_folders(place: str) -> list[Path]:
    """Return the folders that writing will create, the innermost first."""
    if "://" in place:
        return []
    path = Path(place).absolute()
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _problems(
    place: str, failures: list[str | None], all_unseen: list[list[int]], all_stale: list[list[int]]
) -> Iterator[str]:
    for rank, failure in enumerate(failures):
        if failure is not None:
            yield f"rank {rank} cannot write to {place}: {failure}"
    for rank, unseen in enumerate(all_unseen):
        if unseen:
            yield (
                f"rank {rank} does not see what ranks {unseen} wrote to {place}: it is not the same place "
                f"there. Use a shared file system or an object store."
            )
    for rank, stale in enumerate(all_stale):
        if stale:
            yield (
                f"rank {rank} still reads the old content of files in {place} that ranks {stale} renamed "
                f"others over: a cache there is not shared. Mount it without one, or use an object store."
            )
