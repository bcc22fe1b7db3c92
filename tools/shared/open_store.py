"""Open a store for a verb: where the store is, how to reach it, and the data it was created for."""

import logging
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from bigscl.common.digests import read_sealed
from bigscl.common.files import BadFile
from bigscl.common.user_error import UserError
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.selection.trust import Trust
from bigscl.store import (
    Annotations,
    HeatmapStore,
    Holder,
    IndexMismatch,
    Snapshot,
    StorageOptions,
    StoreSpec,
    process_start,
)

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bigscl.config import DataConfig
    from bigscl.data.index import Index, Labels
    from bigscl.tools.shared.image_files import ImageFiles

Store = Annotated[
    str, typer.Argument(metavar="STORE", help="A path, the folder of a run, or s3://bucket/prefix (gs, az).")
]
AtSnapshot = Annotated[
    int | None, typer.Option("--snapshot", help="Read this snapshot. Default: the newest.")
]
Apply = Annotated[bool, typer.Option("--apply", help="Do it. Without this, only print what would be done.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageFlags:
    """How to reach an object store."""

    endpoint: Annotated[str | None, typer.Option(help="Address of an S3-compatible server.")] = None
    region: Annotated[str | None, typer.Option(help="Region of the bucket.")] = None
    anonymous: Annotated[
        bool, typer.Option("--anonymous", help="Read a public bucket without credentials.")
    ] = False

    @property
    def options(self) -> StorageOptions:
        return StorageOptions(endpoint=self.endpoint, region=self.region, anonymous=self.anonymous)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Data:
    """The samples that a store was created for, with their labels."""

    index: "Index"
    """With all labels, also those that were hidden from training (`data.canaries`)."""
    labels: "Labels"
    """Which labels of the index are the annotated ones."""
    annotations: Annotations
    """Annotations that the store was created for, without answers of people: its snapshots have those."""
    labelled: "Index"
    """The same samples without answers of people."""
    answers: Path | None
    """The answers that are among the labels."""

    def annotated(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return `[n,L]`: which classes are annotated positives."""
        return np.asarray(self.index.labels_of(ids, self.labels) == 1)

    def present(self, ids: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """Return `[n,L]`: which classes are present; None if the shards do not say."""
        return None if self.index.full is None else self.index.labels_of(ids, "full") == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFlags:
    """Where the data of a store is."""

    shards: Annotated[
        list[str] | None,
        typer.Option(
            help="Tars that the store was created for: a folder, glob or brace pattern. Default: those in "
            "the config.yaml of the store's run."
        ),
    ] = None
    index: Annotated[
        Path | None, typer.Option("--index", help="Index of these tars, if it is not in their folder.")
    ] = None
    images: Annotated[
        Path | None,
        typer.Option(
            help="Images of a store of your own loop, instead of shards: a folder with a subfolder per "
            "class, as torchvision's ImageFolder reads it, or a table of paths and labels, row by row."
        ),
    ] = None
    names: Annotated[
        Path | None, typer.Option("--names", help="With --images: names of the classes, one per line.")
    ] = None

    def files(self) -> "ImageFiles | None":
        """Return the images of an own loop; None if the data are shards."""
        from bigscl.tools.shared.image_files import image_files

        if self.images is None:
            if self.names is not None:
                raise UserError("--names: has no effect without --images")
            return None
        if self.shards is not None:
            raise UserError("--images: has no effect with --shards. Give one of them.")
        return image_files(self.images, self.names)

    def find(self, store: str, spec: StoreSpec) -> Data | None:
        """Return the data of a store: these, or those of its run's config; None if nothing names any."""
        from bigscl.data.index import load_index
        from bigscl.data.labels.training_labels import training_labels, with_hidden

        if (files := self.files()) is not None:
            return _data_of_files(files, store, spec)
        fingerprint = spec.fingerprint

        settings = _data_settings(store, needed=self.shards is None)
        patterns = self.shards or (None if settings is None else settings.train)
        if patterns is None:
            return None
        file = self.index
        if file is None and self.shards is None and settings is not None:
            file = settings.train_index
        for labelled, labels in _labellings(load_index(patterns, file), settings):
            annotations = labelled.annotations(labels)
            if annotations.fingerprint == fingerprint:
                answers = None if settings is None else settings.answers
                return Data(
                    index=with_hidden(training_labels(labelled, labels, answers).index),
                    labels=labels,
                    annotations=annotations,
                    labelled=labelled,
                    answers=answers,
                )
        raise IndexMismatch(
            f"{locate(store)}: was created for data {fingerprint[:12]}, but that is neither the given nor "
            f"the full labels of {patterns}. Give the shards that this store was created from; if its "
            f"run drew the given labels itself (data.given), config.yaml must be next to the store."
        )

    def need(self, what: str, store: str, spec: StoreSpec) -> Data:
        """Return the data of a store, or raise an error that says what it is needed for."""
        data = self.find(store, spec)
        if data is None:
            raise UserError(
                f"{what}: needs the images, and no config.yaml next to {locate(store)} names them. Add "
                f"--shards PATTERN (and --index FILE if their index is not in their folder), or --images "
                f"FOLDER if your own loop read files."
            )
        return data

    def open(
        self, what: str, store: str, snapshot: int | None, storage: StorageFlags
    ) -> tuple[HeatmapStore, Data]:
        """Return the store with its data, which `what` needs."""
        opened = open_store(store, snapshot, storage)
        data = self.need(what, store, opened.spec)
        return open_store(store, opened.snapshot.id, storage, data), data


def _data_of_files(files: "ImageFiles", store: str, spec: StoreSpec) -> Data:
    annotations = files.annotations(spec)
    if annotations.fingerprint != spec.fingerprint:
        raise IndexMismatch(
            f"{locate(store)}: was created for {spec.num_samples:,} samples with other labels or in another "
            f"order than these {len(files.paths):,} images. Give them as the Dataset of the loop has them: "
            f"row n is sample n."
        )
    index = files.index(spec, annotations)
    return Data(index=index, labels="given", annotations=annotations, labelled=index, answers=None)


def locate(store: str) -> str:
    """Return the store's place, also of the folder of its run; UserError if that keeps none on disk."""
    if "://" in store or (Path(store) / "zarr.json").exists():
        return store
    inner = Path(store) / "store"
    if inner.is_dir():
        return str(inner)
    from bigscl.config import load_config

    file = Path(store) / "config.yaml"
    if not file.is_file():
        return store
    settings = load_config(file).store
    if settings.kind != "disk":
        why = (
            "its objective needs none" if settings.kind == "none" else "it was in RAM and ended with the run"
        )
        why = f"{why} (store.kind: {settings.kind})"
        raise UserError(f"{store}: this run keeps no memory on disk: {why}. So there is no store to look at.")
    return settings.url or str(inner)


def with_snapshot(place: str) -> tuple[str, int | None]:
    """Return (store, snapshot) of `store@7`."""
    url, at, number = place.rpartition("@")
    return (url, int(number)) if at and number.isdecimal() else (place, None)


def run_folder(store: str) -> Path | None:
    """Return the folder of the run that is given, or that a local store belongs to; None without one."""
    if (Path(store) / "config.yaml").is_file():
        return Path(store).absolute()
    folder = Path(locate(store)).absolute().parent
    return folder if "://" not in store and (folder / "config.yaml").exists() else None


def open_store(
    store: str, snapshot: int | None, storage: StorageFlags, data: Data | None = None
) -> HeatmapStore:
    """Open the store for reading. With its data, samples that were never visited are readable too."""
    return HeatmapStore.open(
        locate(store),
        snapshot=snapshot,
        options=storage.options,
        annotations=None if data is None else data.annotations,
    )


def _labellings(index: "Index", settings: "DataConfig | None") -> "Iterator[tuple[Index, Labels]]":
    """Yield every set of labels that a run may have taken from these shards, that of its config first."""
    from bigscl.data.labels.training_labels import with_given_labels

    if settings is not None:
        index = with_given_labels(index, settings.labels_file, None)
        drawn = settings.given if index.full is not None else None
        if drawn is not None or settings.canaries:
            yield with_given_labels(index, None, drawn, settings.canaries), "given"
    yield index, "given"
    if index.full is not None:
        yield index, "full"


def _data_settings(store: str, *, needed: bool) -> "DataConfig | None":
    """Return the data section of the run's config; one that cannot be read is an error if needed."""
    from bigscl.config import ConfigError, load_data_settings

    folder = run_folder(store)
    if folder is None:
        return None
    try:
        return load_data_settings(folder / "config.yaml")
    except ConfigError as error:
        if needed:
            raise ConfigError(f"{error}. Or give --shards") from None
        logger.warning("%s. Its data settings are ignored", " ".join(str(error).split()))
        return None


def checkpoints_by_snapshot(folder: Path | None) -> dict[int, list[str]]:
    """Return the names of a run's checkpoints by the snapshot from which each of them resumes."""
    names: dict[int, list[str]] = {}
    for file in sorted((folder / "checkpoints").glob("step-*/progress.json")) if folder is not None else []:
        try:
            snapshot = read_sealed(file, "A run does not resume from it.").get("snapshot")
        except BadFile as error:
            logger.warning("%s", error)
            continue
        if isinstance(snapshot, int):
            names.setdefault(snapshot, []).append(file.parent.name)
    return names


def is_alive(holder: Holder) -> bool | None:
    """Return whether the process that holds the lease is alive; None if it is on another host."""
    here = holder.host == socket.gethostname()
    return process_start(holder.pid) == holder.started if here else None


def snapshot_facts(snapshot: Snapshot, num_classes: int) -> dict[str, Any]:
    """Return facts about a snapshot as JSON, for commands and the page."""
    state = SnapshotState.of(snapshot, num_classes)
    return {
        "id": snapshot.id,
        "epoch": snapshot.epoch,
        "step": snapshot.step,
        "time": snapshot.time,
        "run": snapshot.run,
        "group": snapshot.group,
        "shards_written": sum(slot >= 0 for slot in snapshot.slots),
        "selection": state.selection.any,
        "approximate": state.selection.approximate_classes(),
        "mid_epoch": state.within_epoch,
        "skipped": len(state.skipped),
        "trust": None if state.trust is None else state.trust.to_json(),
    }


def trust_at(store: HeatmapStore) -> Trust | None:
    """Return how far to trust the mined labels of a store's snapshot; None without hidden labels."""
    return SnapshotState.of(store.snapshot, store.spec.num_classes).trust
