"""Saved predictions, ours or those of other tools: everything needed to score them without the network."""

# Shapes: n images, L classes, R best classes of an image.

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zarr
from numpy.typing import NDArray

from bigscl.common.files import BadFile, atomic_folder, parse_errors
from bigscl.common.user_error import UserError
from bigscl.data.index import Index, true_labels
from bigscl.evaluation.evaluate_options import Pooling
from bigscl.evaluation.inference import Predictions
from bigscl.evaluation.metrics import best_classes
from bigscl.store import SEAL

NUM_RANKED = 10
NUMPY_FILE = "a numpy file of plain arrays"
CHUNK_IMAGES = 4096
FILE_NAME = "predictions.zarr"
LARGEST = float(np.finfo(np.float16).max)
ARRAYS: dict[str, Any] = {
    "ids": np.integer,
    "logits": np.floating,
    "ranked": np.integer,
    "map_logits": np.floating,
    "map_ranked": np.integer,
    "labels": np.integer,
}
"""The arrays of a file, beside its keys, and their kinds."""
OPTIONAL = ("labels", "map_logits", "map_ranked")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedPredictions:
    """A network's predictions of some images, and their labels."""

    ids: NDArray[np.int64]
    """[n], ascending."""
    keys: tuple[str, ...]
    """The name of each image in its shard."""
    logits: NDArray[Any]
    """[n,L]; float16 if they are ours."""
    ranked: NDArray[np.int64]
    """[n,R]: the classes of highest logits, best first. In half precision some would be tied."""
    labels: NDArray[np.int8] | None
    """[n,L]: 1 positive, 0 negative, -1 unknown; None if the tool that predicted did not save them."""
    class_names: tuple[str, ...]
    about: dict[str, Any] = field(default_factory=dict)
    """Their origin: `model`, `shards`, `labels`, `missing` (images without a prediction), ..."""
    map_logits: NDArray[Any] | None = None
    """[n,L], by map pooling; None if they were saved by another tool, or before there was map pooling."""
    map_ranked: NDArray[np.int64] | None = None
    """[n,R]: the classes of highest `map_logits`."""

    @property
    def poolings(self) -> tuple[Pooling, ...]:
        return ("plain",) if self.map_logits is None else ("plain", "map")

    def pooled(self, pooling: Pooling) -> "SavedPredictions":
        """Return them with the `logits` and `ranked` of a pooling."""
        if pooling == "plain":
            return self
        if self.map_logits is None or self.map_ranked is None:
            raise UserError(
                f"{self.about['model']}: pooling map, but only plain logits were saved (by another tool, or "
                f"before there was map pooling). Evaluate again, or choose --pooling plain."
            )
        return replace(self, logits=self.map_logits, ranked=self.map_ranked)

    def save(self, path: Path) -> None:
        """Write them as a Zarr group; one that is there already is replaced when the new one is whole."""
        with atomic_folder(path) as partial:
            group = zarr.open_group(partial, mode="w")
            for name in ARRAYS:
                if (values := getattr(self, name)) is not None:
                    chunks = (max(1, min(CHUNK_IMAGES, len(values))), *values.shape[1:])
                    group.create_array(name, data=values, chunks=chunks)
            keys = group.create_array("keys", shape=(len(self.keys),), dtype="str")
            keys[:] = np.array(self.keys, dtype=object)
            group.attrs.update({"class_names": list(self.class_names), "about": self.about})
            group.attrs[SEAL] = self.digest()

    def digest(self) -> str:
        crc = zlib.crc32(json.dumps([self.keys, self.class_names, self.about], sort_keys=True).encode())
        for name in ARRAYS:
            if (values := getattr(self, name)) is not None:
                crc = zlib.crc32(f"{name} {values.dtype} {values.shape}".encode(), crc)
                crc = zlib.crc32(np.ascontiguousarray(values).data, crc)
        return f"{crc:08x}"


def from_network(found: Predictions, index: Index, about: dict[str, Any]) -> SavedPredictions:
    """Return a network's predictions with the labels of their images, ready to be saved and scored."""
    labels, which = true_labels(index, found.ids)
    missing = np.setdiff1d(index.ids(), found.ids)
    return SavedPredictions(
        ids=found.ids,
        keys=tuple(index.key(int(sample_id)) for sample_id in found.ids),
        logits=_half(found.logits),
        ranked=_ranked(found.logits),
        map_logits=None if found.map_logits is None else _half(found.map_logits),
        map_ranked=None if found.map_logits is None else _ranked(found.map_logits),
        labels=labels,
        class_names=index.class_names,
        about={**about, "labels": which, "missing": [index.key(int(sample_id)) for sample_id in missing]},
    )


def load_predictions(path: Path, *, keys: Path | None = None, labels: Path | None = None) -> SavedPredictions:
    """Load predictions from a folder of ours, or the logits of another tool.

    Ours: `predictions.zarr`, the folder it is in, or a run with one evaluation. Others: an .npz with `logits`
    [n,L] and `keys` [n], and `labels` and `class_names` if it has them; or an .npy with logits, `keys` (one a
    line, or .npy). `labels` are [n] class numbers, or [n,L] with 1 positive, 0 negative, -1 unknown (.npy).
    """
    if path.suffix not in (".npy", ".npz"):
        if keys is not None or labels is not None:
            raise UserError(f"{path}: has keys and labels of its own; --keys and --labels are for .npy files")
        return _load_group(_find_group(path))
    arrays = _arrays(path)
    if keys is not None:
        arrays["keys"] = _read_keys(keys)
    if labels is not None:
        arrays["labels"] = _load_array(labels)
    return _from_arrays(path, arrays)


def _find_group(path: Path) -> Path:
    """Return the group that a path means: itself, that in a folder, or that of the evaluation of a run."""
    if path.suffix == ".zarr" or (path / FILE_NAME).is_dir():
        return path if path.suffix == ".zarr" else path / FILE_NAME
    usual, found = path / "evaluation" / FILE_NAME, sorted(path.glob(f"*/{FILE_NAME}"))
    if usual in found or len(found) == 1:
        return usual if usual in found else found[0]
    if found:
        names = ", ".join(str(group.parent) for group in found)
        raise UserError(f"{path}: has several evaluations, give one of them: {names}")
    if (path / "config.yaml").is_file():
        raise FileNotFoundError(f"{path}: this run has no evaluation yet. Make one: bigscl evaluate {path}")
    return path / FILE_NAME


def _load_group(path: Path) -> SavedPredictions:
    if not (path / "zarr.json").is_file():
        raise FileNotFoundError(
            f"{path}: no predictions there. Expected a folder that bigscl.evaluate wrote, an .npz or an .npy."
        )
    with parse_errors(path, "predictions of bigscl.evaluate", "Evaluate again."):
        group = zarr.open_group(path, mode="r")
        arrays: dict[str, Any] = {name: np.asarray(values[:]) for name, values in group.arrays()}
        attributes: dict[str, Any] = dict(group.attrs)
        saved = SavedPredictions(
            ids=arrays["ids"],
            keys=tuple(map(str, arrays["keys"].tolist())),
            logits=arrays["logits"],
            ranked=arrays["ranked"],
            map_logits=arrays.get("map_logits"),
            map_ranked=arrays.get("map_ranked"),
            labels=arrays.get("labels"),
            class_names=tuple(map(str, attributes["class_names"])),
            about=dict(attributes["about"]),
        )
        _check(saved)
        if (found := saved.digest()) != attributes.get(SEAL):
            raise UserError(f"damaged: its values have the digest {found}, it says {attributes.get(SEAL)}")
    return saved


def _check(saved: SavedPredictions) -> None:
    """Raise UserError if the arrays do not fit together."""
    n, num_classes = len(saved.keys), len(saved.class_names)
    ranks = min(NUM_RANKED, num_classes)
    columns = {"ids": (), "ranked": (ranks,), "map_ranked": (ranks,)}
    for name, kind in ARRAYS.items():
        values, shape = getattr(saved, name), (n, *columns.get(name, (num_classes,)))
        if values is None and name in OPTIONAL:
            continue
        if values.shape != shape or not np.issubdtype(values.dtype, kind):
            found = f"{values.dtype} {list(values.shape)}"
            raise UserError(f"{name} are {found}, expected {kind.__name__} {list(shape)}")
    if (saved.map_logits is None) != (saved.map_ranked is None):
        raise UserError("map_logits and map_ranked: one is missing, expected both or none")
    for ranked in (saved.ranked, saved.map_ranked):
        if ranked is not None and n and not (ranked.min() >= 0 and ranked.max() < num_classes):
            raise UserError(f"ranked has class {ranked.max()} of {num_classes}")
    if saved.labels is not None and not np.isin(saved.labels, (-1, 0, 1)).all():
        raise UserError("labels are not all 1, 0 or -1")


def _arrays(path: Path) -> dict[str, Any]:
    if path.suffix == ".npy":
        return {"logits": _load_array(path)}
    with parse_errors(_there(path), NUMPY_FILE, "Save it again."), path.open("rb") as file:
        content = np.load(file, allow_pickle=False)
        return {name: np.asarray(content[name]) for name in content.files}


def _load_array(path: Path) -> NDArray[Any]:
    with parse_errors(_there(path), NUMPY_FILE, "Save it again."), path.open("rb") as file:
        content = np.load(file, allow_pickle=False)
        if not isinstance(content, np.ndarray):
            raise UserError("several arrays, expected one")
        return content


def _from_arrays(path: Path, arrays: dict[str, Any]) -> SavedPredictions:
    for name in ("logits", "keys"):
        if name not in arrays:
            raise BadFile(f"{path}: no {name}. Expected `logits` [n, classes] and `keys` [n]; see --keys.")
    logits, keys = arrays["logits"], np.asarray(arrays["keys"]).reshape(-1).astype(str).tolist()
    if logits.ndim != 2 or len(keys) != len(logits) or not np.issubdtype(logits.dtype, np.floating):
        raise BadFile(
            f"{path}: logits are {logits.dtype} {list(logits.shape)} and there are {len(keys)} keys; "
            f"expected floating-point [n, classes], and a key for each row"
        )
    names = np.asarray(arrays.get("class_names", range(logits.shape[1]))).reshape(-1).tolist()
    if len(names) != logits.shape[1] or logits.shape[1] < 1:
        raise BadFile(f"{path}: {len(names)} class_names for logits of {logits.shape[1]} classes")
    return SavedPredictions(
        ids=np.arange(len(logits)),
        keys=tuple(keys),
        logits=logits,
        ranked=_ranked(logits),
        labels=None if "labels" not in arrays else _as_matrix(path, arrays["labels"], logits.shape),
        class_names=tuple(str(name) for name in names),
        about={"model": path.name, "labels": "full", "missing": []},
    )


def _as_matrix(path: Path, labels: NDArray[Any], shape: Sequence[int]) -> NDArray[np.int8]:
    """Return labels [n,L], from the same or from one class per image."""
    if labels.shape == (shape[0],) and np.issubdtype(labels.dtype, np.integer):
        if labels.size and (labels.min() < 0 or labels.max() >= shape[1]):
            raise BadFile(f"{path}: labels go from {labels.min()} to {labels.max()} of {shape[1]} classes")
        matrix = np.zeros(shape, np.int8)
        matrix[np.arange(len(labels)), labels] = 1
        return matrix
    if labels.shape != tuple(shape) or not np.isin(labels, (-1, 0, 1)).all():
        raise BadFile(
            f"{path}: labels are {labels.dtype} {list(labels.shape)}; expected class numbers [{shape[0]}], "
            f"or {list(shape)} of 1 (positive), 0 (negative) and -1 (unknown)"
        )
    return labels.astype(np.int8)


def _read_keys(path: Path) -> Sequence[str]:
    if path.suffix == ".npy":
        keys: list[str] = _load_array(path).reshape(-1).astype(str).tolist()
        return keys
    with parse_errors(_there(path), "a list of keys, one a line", "Give another file."):
        return path.read_text().split()


def _there(path: Path) -> Path:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file")
    return path


def _half(logits: NDArray[np.float32]) -> NDArray[np.float16]:
    return logits.clip(-LARGEST, LARGEST).astype(np.float16)


def _ranked(logits: NDArray[Any]) -> NDArray[np.int64]:
    scores = torch.from_numpy(np.ascontiguousarray(logits))
    ranked: NDArray[np.int64] = best_classes(scores, min(NUM_RANKED, logits.shape[1])).numpy()
    return ranked
