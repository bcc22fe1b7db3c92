"""A run on the page: its store, its data, and the index of its scores, which follows the run."""

import hashlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from bigscl.common.failures import explain
from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.config import Config, ConfigError, load_config
from bigscl.store import HeatmapStore, SnapshotLog, StoreError
from bigscl.tools.shared.find_samples import initial_share
from bigscl.tools.shared.open_store import (
    DataFlags,
    StorageFlags,
    locate,
    open_store,
    run_folder,
    trust_at,
    with_snapshot,
)
from bigscl.tools.shared.terminal import few_visits_note
from bigscl.tools.viewer.index_building import build_index
from bigscl.tools.viewer.score_index import Against, ScoreIndex, disagreement, open_index

logger = logging.getLogger(__name__)
Read = TypeVar("Read")

LARGEST_SHARE = 0.01
"""Share of the time that is spent on indexes of a running training: a pass reads its whole store."""
TRIES = 3
SECONDS_TO_COMPARE = 1.0
"""A request waits so long for the comparison of two runs; then the page asks again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Places:
    """Where stores and shards are, and where indexes are kept."""

    source: DataFlags
    storage: StorageFlags
    cache: Path | None = None
    needed_for: str = "view"
    """What needs the shards, for the message if nothing names them."""


class OpenRun:
    """A run that is looked at while it trains, or after. Its store is only read."""

    # `_lock` is held while an index is made. Requests read `store` and `index`, which are replaced whole.

    def __init__(self, place: str, places: Places) -> None:
        self._url, self._pinned = with_snapshot(place)
        self._storage = places.storage
        self.store, self.data = places.source.open(places.needed_for, self._url, self._pinned, places.storage)
        self.folder = run_folder(self._url)
        self.name = printable(place.rstrip("/"))
        self.config = _config_of(self.folder)
        self.cache = places.cache or default_cache(self.folder, locate(self._url))
        """Folder of its indexes."""
        self._lock = threading.Lock()
        self.index: ScoreIndex | None = open_index(self.cache, self.store)
        self.progress: tuple[int, int] | None = None
        """Shards done and all shards of the index that is being built."""
        self.failure = ""
        self._built = float("-inf")
        self._against: dict[str, Against] = {}
        self._comparing: threading.Thread | None = None

    def read(self, work: Callable[[HeatmapStore], Read], snapshot: int | None = None) -> Read:
        """Return what is read of this snapshot, or of the one that is shown.

        If a training drops the latter meanwhile, the newest is read, and shown from then on.
        """
        if snapshot is not None and snapshot != self.store.snapshot.id:
            return work(self.at(snapshot))
        for _ in range(TRIES - 1):
            store = self.store
            try:
                return work(store)
            except StoreError:
                self.reopen()
                # Not so if another request has reopened it at the same time.
                if self.store is store:
                    raise
        return work(self.store)

    def at(self, snapshot: int) -> HeatmapStore:
        return open_store(self._url, snapshot, self._storage, self.data)

    def follow(self) -> None:
        """Go to the newest snapshot, and to its index when that is due; the page shows what goes wrong."""
        try:
            self.update()
            self.failure = ""
        except (StoreError, UserError, OSError) as error:
            self._fail(error)

    def update(self, *, now: bool = False) -> None:
        """Go to the newest snapshot; make its index if there is none and it is due, or `now`."""
        self.reopen()
        with self._lock:
            if self._is_due(now):
                self._build()

    def _fail(self, error: Exception) -> None:
        self.failure = explain(error) or str(error)
        logger.warning("%s: %s", self.name, self.failure)

    def reopen(self) -> None:
        """Go to the newest snapshot, unless one was asked for."""
        if self._pinned is None and SnapshotLog(self.store.backend).newest() != self.store.snapshot.id:
            self.store = open_store(self._url, None, self._storage, self.data)

    def _is_due(self, now: bool) -> bool:
        if self.index is None or now:
            return self.index is None or self.index.snapshot != self.store.snapshot.id
        waited = time.monotonic() - self._built
        return self.index.snapshot != self.store.snapshot.id and waited * LARGEST_SHARE >= self.index.seconds

    def _build(self) -> None:
        try:
            self.index = self.read(
                lambda store: (
                    open_index(self.cache, store) or build_index(self.cache, store, self.data, self._advance)
                )
            )
        finally:
            self.progress = None
        self._built = time.monotonic()

    def _advance(self, done: int, total: int) -> None:
        self.progress = (done, total)

    def same_samples(self, other: "OpenRun") -> bool:
        """Return whether both runs have the same samples in the same rows, and the same classes."""
        mine, its = self.data.index, other.data.index
        return (
            mine.class_names == its.class_names
            and np.array_equal(mine.shard_sizes, its.shard_sizes)
            and np.array_equal(mine.keys.offsets, its.keys.offsets)
            and np.array_equal(mine.keys.values, its.keys.values)
        )

    def against(self, other: "OpenRun") -> Against | None:
        """Return how another run differs; None while that is being computed, in a thread of its own."""
        name = self._name_against(other)
        if name is None or name in self._against:
            return None if name is None else self._against[name]
        if self._comparing is None or not self._comparing.is_alive():
            self._comparing = threading.Thread(target=self._compare, args=(other,), daemon=True)
            self._comparing.start()
        self._comparing.join(SECONDS_TO_COMPARE)
        return self._against.get(name)

    def _name_against(self, other: "OpenRun") -> str | None:
        return (
            None if self.index is None or other.index is None else f"{self.index.folder} {other.index.folder}"
        )

    def _compare(self, other: "OpenRun") -> None:
        with self._lock:
            mine, its, name = self.index, other.index, self._name_against(other)
            assert mine is not None
            assert its is not None
            assert name is not None
            try:
                stores = self.at(mine.snapshot), other.at(its.snapshot)
                pairs = disagreement(*stores, mine, its.folder.name)
                self._against = {name: Against(index=its, pairs=pairs)}
                self.failure = ""
            except (StoreError, UserError, OSError) as error:
                self._fail(error)

    def state(self) -> dict[str, Any]:
        """Return which snapshots are there, and how the index is."""
        return {
            "shown": self.store.snapshot.id,
            "epoch": self.store.snapshot.epoch,
            "pinned": self._pinned is not None,
            "indexed": None if self.index is None else self.index.snapshot,
            "before": None if self.index is None else self.index.before,
            "progress": self.progress,
            "failure": printable(self.failure),
            "note": " ".join(self._notes()),
        }

    def _notes(self) -> list[str]:
        """Return how far to trust scores and mined labels, as far as it is known."""
        trust = trust_at(self.store)
        notes = [line.strip() for line in few_visits_note(initial_share(self.store))]
        return notes if trust is None else [*notes, f"{trust}."]


def _config_of(folder: Path | None) -> Config | None:
    """Return the config of a run; None if there is no whole one."""
    try:
        return None if folder is None else load_config(folder / "config.yaml")
    except ConfigError:
        return None


def default_cache(folder: Path | None, url: str) -> Path:
    """Return where the indexes of a store are kept: with its run, or with its user if it is read-only."""
    if folder is not None and os.access(
        folder, os.W_OK, effective_ids=os.access in os.supports_effective_ids
    ):
        return folder / "view"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return home / "bigscl" / "view" / hashlib.sha256(url.encode()).hexdigest()[:16]


# Curves

LARGEST_PART = 4_000_000


def curves_of(folder: Path | None, after: int) -> dict[str, Any]:
    """Return the lines from byte `after` on, and where the next ones will start.

    A file that is shorter than that was started again: then all lines, with `start` 0.
    """
    file = None if folder is None else folder / "metrics.jsonl"
    if file is None or not file.is_file():
        return {"start": 0, "next": 0, "lines": []}
    with file.open("rb") as opened:
        end = opened.seek(0, 2)
        start = after if after <= end else 0
        opened.seek(start)
        data = opened.read(LARGEST_PART)
    # The last line may still be written.
    whole = data[: data.rfind(b"\n") + 1]
    return {
        "start": start,
        "next": start + len(whole),
        "lines": [*filter(None, map(_numbers, whole.splitlines()))],
    }


def _numbers(line: bytes) -> dict[str, Any] | None:
    """Return the kind and the numbers of a line; None if a crash left it incomplete."""
    try:
        values = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(values, dict) or not isinstance(values.get("kind"), str):
        return None
    numbers = {
        name: value
        for name, value in values.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
    return {"kind": values["kind"], **numbers}
