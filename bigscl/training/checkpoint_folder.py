"""Checkpoints: atomic folders, each of which names its run and a snapshot of its store.

A folder of weights has one JSON file with the digests of the others and of its own values: `progress.json` in
a checkpoint, `metrics.json` in `best`. Nothing is read from a file that has another digest.
"""

import _codecs
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Annotated, Any

import torch
from pydantic import Field, TypeAdapter, ValidationError
from safetensors.torch import load_file, save
from torch import Tensor

from bigscl.common.digests import FILES, PROGRESS, DigestingFile, check_file, read_sealed, write_sealed
from bigscl.common.files import (
    BadFile,
    atomic_folder,
    find_folder,
    name_os_errors,
    remove_folder,
    rename_folder,
    repair_folder,
)
from bigscl.common.user_error import UserError
from bigscl.models.families.base import differences

# Bytes, as of random states, are pickled as a call of this harmless function, which torch 2.4 refuses.
torch.serialization.add_safe_globals([_codecs.encode])
Count = Annotated[int, Field(ge=0, strict=True)]


REMEDY = "Resume from another checkpoint with --resume, or restore this one from a copy."


class CheckpointError(UserError):
    """A checkpoint cannot be resumed from; the message names the file and the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run stands."""

    epoch: Count = 0
    """The epoch that is being trained, or comes next."""
    step: Count = 0
    """Optimizer steps so far."""
    snapshot: Count | None = None
    """The snapshot of the store that belongs to it; None without a store."""
    best: float | None = None
    """The best validation metric so far."""
    best_epoch: Count | None = None
    run: str = ""
    """The id of the run."""
    ends_epoch: bool = True
    """Whether it was saved at the end of an epoch, not within one."""
    decoder: str = "torchvision"
    """The decoder of its epoch's images."""


# Files of a checkpoint

Writer = Callable[[IO[bytes]], object]
"""Writes one file of a folder, from its start to its end."""


def write_files(
    path: Path,
    files: Mapping[str, Writer],
    head: str,
    values: Mapping[str, Any],
    check: Callable[[], object] = lambda: None,
) -> None:
    """Make a folder of these files atomically, and of `head` with values and digests; see `atomic_folder`."""
    digests = {}
    with atomic_folder(path, check) as partial:
        for name, write in files.items():
            with name_os_errors(path / name, partial / name), (partial / name).open("wb") as file:
                digesting = DigestingFile(file)
                write(digesting)  # type: ignore[arg-type]
                digests[name] = digesting.digest
        with name_os_errors(path / head, partial / head):
            write_sealed(partial / head, {**values, FILES: digests})


def write_tensors(tensors: Mapping[str, Tensor]) -> Writer:
    """Return a writer of named tensors as safetensors, with their values of now."""
    plain = {name: copy_on_host(tensor).contiguous() for name, tensor in tensors.items()}
    return lambda file: write_safetensors(file, plain)


DTYPES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Their names in safetensors, in the order in which it writes their tensors."""
HEADER_ALIGNMENT = 8


def write_safetensors(file: IO[bytes], tensors: Mapping[str, Tensor]) -> None:
    """Write contiguous tensors on the host, with the bytes of `safetensors.torch.save`.

    That builds the whole file under Python's lock, for which the training step waits: 0.6 s per 315 MB. Here
    other threads run while tensors are written. `save_file` would make files that only their owner can read,
    and its errors carry no errno.
    """
    if any(tensor.dtype not in DTYPES for tensor in tensors.values()):
        file.write(save(dict(tensors)))  # rare: complex buffers
        return
    order = list(DTYPES)
    names = sorted(tensors, key=lambda name: (order.index(tensors[name].dtype), name))
    entries, end = {}, 0
    for name in names:
        first, end = end, end + tensors[name].nbytes
        shape = list(tensors[name].shape)
        entries[name] = {"dtype": DTYPES[tensors[name].dtype], "shape": shape, "data_offsets": [first, end]}
    header = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % HEADER_ALIGNMENT)
    file.write(len(header).to_bytes(8, "little") + header)
    for name in names:
        file.write(tensors[name].reshape(-1).view(torch.uint8).numpy().data)


def write_state(state: Any) -> Writer:
    """Return a writer of nested tensors and numbers of now, which can be read without running code."""
    copied = copy_on_host(state)

    def write(file: IO[bytes]) -> None:
        try:
            torch.save(copied, file)
        except RuntimeError as error:
            # This is how torch's zip writer reports a failed write when it closes.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise

    return write


def copy_on_host(value: Any) -> Any:
    """Return nested tensors and numbers with all tensors copied to the host: training may go on."""
    match value:
        case Tensor():
            return value.detach().to("cpu", copy=True)
        case Mapping():
            return {name: copy_on_host(inner) for name, inner in value.items()}
        case list() | tuple():
            return type(value)(copy_on_host(inner) for inner in value)
        case _:
            return value


# Checkpoints


class Checkpoint:
    """One checkpoint folder. Each file is read once and stays in memory."""

    def __init__(self, path: Path) -> None:
        self.path = find_folder(path)
        self.progress, self._digests = _read_progress(self.path / PROGRESS)
        self._read: dict[str, Any] = {}

    def tensors(self, name: str) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self._parsed(name, load_file)
        return found

    def state(self, name: str) -> Any:
        """Return what `write_state` wrote."""
        return self._parsed(name, lambda path: torch.load(path, map_location="cpu", weights_only=True))

    def _parsed(self, name: str, parse: Callable[[Path], Any]) -> Any:
        if name not in self._read:
            try:
                check_file(self.path / name, PROGRESS, self._digests.get(name), REMEDY)
                self._read[name] = parse(self.path / name)
            except FileNotFoundError:
                raise CheckpointError(f"{self.path / name}: no such file. {REMEDY}") from None
            except BadFile as error:
                raise CheckpointError(str(error)) from None
            except Exception as error:  # damaged bytes make torch's readers raise anything
                reason = str(error).split("\n")[0][:200] or type(error).__name__
                raise CheckpointError(f"{self.path / name}: damaged: {reason}. {REMEDY}") from error
        return self._read[name]


def _read_progress(path: Path) -> tuple[Progress, dict[str, str]]:
    """Return where a checkpoint stands, and the digests of its files."""
    try:
        values = read_sealed(path, REMEDY)
        digests = TypeAdapter(dict[str, str]).validate_python(values.get(FILES))
        return TypeAdapter(Progress).validate_python(values), digests
    except BadFile as error:
        raise CheckpointError(str(error)) from None
    except (FileNotFoundError, NotADirectoryError):
        raise CheckpointError(f"{path.parent}: not a checkpoint folder (no {PROGRESS} in it)") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"])) or "content"
        raise CheckpointError(f"{path}: damaged: {where}: {first['msg']}. {REMEDY}") from None


class Checkpoints:
    """The checkpoints of a run, oldest first, of which `keep` are kept."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder = folder
        self._keep = keep

    def paths(self) -> list[Path]:
        """Return all checkpoint folders, readable or not, and those that a crash left half replaced."""
        names = {path.name for path in self._folder.glob("step-*")}
        names |= {path.name[1:-4] for path in self._folder.glob(".step-*.old")}
        # Not a user's copy, such as step-00000200.good.
        ours = sorted(name for name in names if name.removeprefix("step-").isdigit())
        return [self._folder / name for name in ours]

    def all(self) -> list[Checkpoint]:
        """Return all checkpoints whose progress can be read."""
        found = []
        for path in self.paths():
            try:
                found.append(Checkpoint(path))
            except CheckpointError:
                continue  # reported when the run started
        return found

    def latest(self) -> Checkpoint | None:
        found = self.all()
        return found[-1] if found else None

    def save(
        self, progress: Progress, files: Mapping[str, Writer], check: Callable[[], object] = lambda: None
    ) -> Path:
        """Write a checkpoint, then remove those that are not kept any more; `check` as in `atomic_folder`."""
        path = self._folder / f"step-{progress.step:08d}"
        write_files(path, files, PROGRESS, asdict(progress), check)
        self.prune()
        return path

    def prune(self) -> None:
        found = self.all()
        kept = kept_of([checkpoint.progress for checkpoint in found], self._keep)
        for checkpoint in found:
            if checkpoint.progress not in kept:
                remove_folder(checkpoint.path)

    def repair(self) -> None:
        """Complete or undo what a crash interrupted in the folder."""
        for leftover in self._folder.glob(".step-*"):
            repair_folder(self._folder / leftover.name[1:].rpartition(".")[0])

    def drop_after(self, kept: Checkpoint) -> None:
        """Remove checkpoints newer than the one that the run resumes from: their snapshots are dropped."""
        for checkpoint in self.all():
            if checkpoint.progress.step > kept.progress.step:
                remove_folder(checkpoint.path)

    def set_aside(self, paths: Iterable[Path]) -> None:
        """Rename unusable checkpoints, so that they are neither resumed from nor lost."""
        for path in paths:
            rename_folder(path, path.with_name(f"unusable-{path.name}"))

    def snapshots(self) -> set[int]:
        """Return the snapshots that the checkpoints name, which must not be dropped."""
        return _snapshots([checkpoint.progress for checkpoint in self.all()])

    def snapshots_after(self, progress: Progress) -> set[int]:
        """Return the snapshots that the checkpoints name once another one is saved and the rest pruned."""
        # One of the same step is replaced.
        older = [each.progress for each in self.all() if each.progress.step < progress.step]
        return _snapshots(kept_of([*older, progress], self._keep))


def _snapshots(of: list[Progress]) -> set[int]:
    return {progress.snapshot for progress in of if progress.snapshot is not None}


def kept_of(found: list[Progress], keep: int) -> list[Progress]:
    """Return the checkpoints to keep: the newest, then the newest ends of epochs, then the newest others."""
    newest, older = found[-1:], reversed(found[:-1])
    # Sorting keeps the order of equals: within each kind the newest comes first.
    return [*newest, *sorted(older, key=lambda one: not one.ends_epoch)][:keep]


# Checks of the contents


def check_tensors(file: Path, found: Any, expected: Mapping[str, Tensor]) -> None:
    """Raise CheckpointError unless these are tensors of the expected names and shapes."""
    if not isinstance(found, Mapping) or not all(isinstance(value, Tensor) for value in found.values()):
        raise CheckpointError(f"{file}: holds {type(found).__name__}, expected names and tensors")
    if reason := differences(found, expected):
        raise CheckpointError(
            f"{file}: does not fit this network and data: {reason}. Resume with the model.backbone and "
            f"the data it was saved with."
        )


def check_optimizer(file: Path, found: Any) -> None:
    """Raise CheckpointError unless this is what `ModelState.files` writes of the optimizer."""
    fields = {"phase_began": int | None, "optimizer": dict, "scaler": dict | None}
    inner = {"state": dict, "param_groups": list}
    if (
        not _has(found, fields)
        or not _has(found["optimizer"], inner)
        or not all(isinstance(values, dict) for values in found["optimizer"]["state"].values())
        or not all(_has(group, {"params": list}) for group in found["optimizer"]["param_groups"])
    ):
        raise CheckpointError(f"{file}: not the state of an optimizer, expected {', '.join(fields)}")


def check_ranks(file: Path, found: Any, num_rows: int) -> None:
    """Raise CheckpointError unless this holds the ranks' random states and a bit for every row."""
    if not _has(found, {"rng": list, "visited": Tensor}):
        raise CheckpointError(f"{file}: not the state of the ranks, expected rng and visited")
    rows, expected = found["visited"], -(-num_rows // 8)
    if rows.dtype != torch.uint8 or rows.shape != (expected,):
        raise CheckpointError(
            f"{file}: visited is {rows.dtype} {tuple(rows.shape)}, expected {expected} bytes for "
            f"{num_rows} rows. Resume with the data it was saved with."
        )
    length = len(torch.get_rng_state())
    if not all(isinstance(rng, bytes) and _first_length(rng) == length for rng in found["rng"]):
        raise CheckpointError(f"{file}: rng holds no random states of {length} bytes, as this torch has them")


def _first_length(packed: bytes) -> int | None:
    """Return the length of the first generator's state, or None if the bytes are incomplete."""
    length = int.from_bytes(packed[:8], "little")
    return length if len(packed) >= 8 + length else None


def _has(found: Any, fields: Mapping[str, Any]) -> bool:
    return isinstance(found, dict) and all(
        name in found and isinstance(found[name], kind) for name, kind in fields.items()
    )


def misfit(saved: Any, own: Any, groups: Sequence[Mapping[str, Any]]) -> str | None:
    """Return why a saved optimizer state does not fit an optimizer with this state and these parameters."""
    pairs = zip(saved["param_groups"], own["param_groups"], strict=False)
    if not all(_same_kind(group, other) for group, other in pairs):
        return "it is the state of another optimizer"
    parameters = [parameter for group in groups for parameter in group["params"]]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    if len(numbers) != len(parameters):
        return f"it has {len(numbers)} parameters, expected {len(parameters)}"
    sizes = [[len(group["params"]) for group in state["param_groups"]] for state in (saved, own)]
    if sizes[0] != sizes[1]:
        # Of norms and biases, or of layers: torch would say no more than that the groups differ.
        return f"its {len(sizes[0])} groups of parameters have {sizes[0]} of them, expected {sizes[1]}"
    for number, parameter in zip(numbers, parameters, strict=True):
        for name, value in saved["state"].get(number, {}).items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameter.shape:
                return (
                    f"{name} of parameter {number} is {tuple(value.shape)}, expected {tuple(parameter.shape)}"
                )
    return None


def _same_kind(group: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether two groups are of the same kind of optimizer, whose name torch does not save."""
    # AdamW; torch before 2.6 does not save it, and the checkpoint may be of another version.
    decoupled = {one["decoupled_weight_decay"] for one in (group, other) if "decoupled_weight_decay" in one}
    same_names = all((name in group) == (name in other) for name in ("betas", "momentum", "amsgrad"))
    return same_names and len(decoupled) < 2
