"""What every verb over a store has in common: where the store is, and the data it was made for."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from bigscl.files import read_json_object
from bigscl.store import (
    Annotations,
    HeatmapStore,
    IndexMismatch,
    Snapshot,
    StorageOptions,
)

logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from bigscl.data.index import Index, Labels

Store = Annotated[
    str,
    typer.Argument(metavar="STORE", help="A path, the folder of a run, or s3://bucket/prefix (gs, az)."),
]
AtSnapshot = Annotated[
    int | None, typer.Option("--snapshot", help="Its state at this snapshot, not at the newest.")
]
Shards = Annotated[
    list[str] | None,
    typer.Option(
        help="The tars the store was made for: a folder, glob or brace pattern. Unless told: those of "
        "the run's config.yaml beside the store."
    ),
]
IndexFile = Annotated[
    Path | None, typer.Option("--index", help="The index of those tars, if it is not beside them.")
]
Endpoint = Annotated[str | None, typer.Option(help="Address of an S3-compatible server.")]
Region = Annotated[str | None, typer.Option(help="Region of the bucket.")]
Anonymous = Annotated[bool, typer.Option("--anonymous", help="Read a public bucket without credentials.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]
Apply = Annotated[bool, typer.Option("--apply", help="Do it; without this, only say what would be done.")]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Data:
    """The samples a store was made for, with the labels that training saw."""

    index: "Index"
    labels: "Labels"
    """Which of the index's labels are the annotated ones."""
    annotations: Annotations

    def annotated(self, ids: NDArray[np.int64]) -> NDArray[np.bool_]:
        """`[n,L]`: which classes are annotated positives."""
        mask: NDArray[np.bool_] = self.index.labels_of(ids, self.labels) == 1
        return mask

    def present(self, ids: NDArray[np.int64]) -> NDArray[np.bool_] | None:
        """`[n,L]`: which classes are really there; None where the shards do not say."""
        return None if self.index.labels is None else self.index.labels_of(ids, "labels") == 1


def locate(store: str) -> str:
    """Where the store is: the place itself, or `store` in it if it is the folder of a run."""
    inner = Path(store) / "store"
    is_run = "://" not in store and not (Path(store) / "zarr.json").exists() and inner.is_dir()
    return str(inner) if is_run else store


def run_folder(store: str) -> Path | None:
    """The folder of the run that a local store lies in, if it lies in one."""
    folder = Path(locate(store)).absolute().parent
    return folder if "://" not in store and (folder / "config.yaml").exists() else None


def options(endpoint: str | None, region: str | None, anonymous: bool) -> StorageOptions:
    """How to reach the store."""
    return StorageOptions(endpoint=endpoint, region=region, anonymous=anonymous)


def open_store(
    store: str, snapshot: int | None, reach: StorageOptions, data: Data | None = None
) -> HeatmapStore:
    """The store for reading; never-visited samples are readable if its data is given."""
    return HeatmapStore.open(
        locate(store),
        snapshot=snapshot,
        options=reach,
        annotations=None if data is None else data.annotations,
    )


def find_data(store: str, fingerprint: str, shards: list[str] | None, index_file: Path | None) -> Data | None:
    """The data a store was made for: of these shards, or of its run's config; None if neither is told."""
    from bigscl.data.index import load_index

    settings = _data_settings(store)
    patterns: Any = shards or settings.get("train")
    if patterns is None:
        return None
    if index_file is None and shards is None and settings.get("train_index"):
        index_file = Path(settings["train_index"])
    index = load_index(patterns, index_file)
    for candidate, labels in _labellings(index, settings.get("observed")):
        annotations = candidate.annotations(labels)
        if annotations.fingerprint == fingerprint:
            return Data(index=candidate, labels=labels, annotations=annotations)
    raise IndexMismatch(
        f"{locate(store)}: made for data {fingerprint[:12]}, neither the observed nor the full labels of "
        f"{patterns}. Give the shards this store was made from; if its run drew labels anew "
        f"(data.observed), config.yaml must lie beside the store."
    )


def need_data(
    what: str, store: str, fingerprint: str, shards: list[str] | None, index_file: Path | None
) -> Data:
    """The data a store was made for; an error that says what it is needed for, if it is not told."""
    data = find_data(store, fingerprint, shards, index_file)
    if data is None:
        raise ValueError(
            f"{what}: the shards are needed, and no config.yaml next to {locate(store)} names them. "
            f"Add --shards PATTERN, and --index FILE if their index is not beside them."
        )
    return data


def _labellings(index: "Index", drawn: dict[str, int] | None) -> "list[tuple[Index, Labels]]":
    """Every set of annotated labels that a run may have taken from these shards."""
    found: list[tuple[Index, Labels]] = [(index, "observed")]
    if index.labels is not None:
        found.append((index, "labels"))
        if drawn:
            found.append((index.draw_observed(**drawn), "observed"))
    return found


def _data_settings(store: str) -> dict[str, Any]:
    """The data section of the config that the store's run saved; empty if there is none."""
    folder = run_folder(store)
    if folder is None:
        return {}
    import yaml

    path = folder / "config.yaml"
    try:
        config = yaml.safe_load(path.read_text())
    except (ValueError, RecursionError, AttributeError, TypeError, yaml.YAMLError) as error:
        logger.warning("%s: damaged, its data settings are unknown: %s", path, " ".join(str(error).split()))
        return {}
    section = config.get("data") if isinstance(config, dict) else None
    if not isinstance(section, dict):
        return {}
    if wrong := [name for name, check in _CHECKS.items() if not check(section.get(name))]:
        logger.warning("%s: data.%s: damaged, and ignored", path, ", data.".join(wrong))
    return {name: value for name, value in section.items() if name not in wrong}


def _is_patterns(value: Any) -> bool:
    return value is None or isinstance(value, str) or _all_are(value, list, str)


def _is_drawing(value: Any) -> bool:
    names = {"seed", "positives", "negatives"}
    return value is None or (
        "seed" in value if _all_are(value, dict, int) and {*value} <= names else value == {}
    )


def _all_are(values: Any, kind: type, inner: type) -> bool:
    parts = values.values() if isinstance(values, dict) else values
    return isinstance(values, kind) and all(isinstance(part, inner) for part in parts)


_CHECKS = {
    "train": _is_patterns,
    "train_index": lambda value: value is None or isinstance(value, str),
    "observed": _is_drawing,
}
"""What the settings that are read here must be."""


def checkpoints_by_snapshot(folder: Path | None) -> dict[int, list[str]]:
    """Names of the checkpoints in a run's folder, by the snapshot each of them resumes from."""
    found: dict[int, list[str]] = {}
    for file in sorted((folder / "checkpoints").glob("step-*/progress.json")) if folder is not None else []:
        snapshot = (read_json_object(file) or {}).get("snapshot")
        if isinstance(snapshot, int):
            found.setdefault(snapshot, []).append(file.parent.name)
    return found


def has_selection(snapshot: Snapshot) -> bool:
    """Whether any expected positives had been chosen by then."""
    cuts = snapshot.attributes.get("selection")
    return cuts is not None and any(last_id >= 0 for last_id in cuts["last_id"])
