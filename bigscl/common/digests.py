"""Digests of a run's files: a reader notices every file that its writer did not leave so.

All are CRC-32, of the bytes as they are written: 0.3 s per GB. Small JSON files have one of their own values
(`bigscl.store.seal`), folders of weights one of each file in such a JSON file, arrays one at their end.
"""

import io
import json
import mmap
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from bigscl.common.files import BadFile, atomic_write, parse_errors, read_json_object, write_text
from bigscl.common.user_error import UserError
from bigscl.store import SEAL, seal, seal_fault

PROGRESS, METRICS = "progress.json", "metrics.json"
"""The sealed files of a checkpoint and of `best`."""
FILES = "files"
"""Their field with the digests of the files beside them, by name."""
CRC_BYTES = 4
BLOCK_BYTES = 2**20


class DigestingFile(io.RawIOBase):
    """A file that is written from its start to its end, and the digest of what was written."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file, self._crc = file, 0

    def write(self, data: Any) -> int:
        self._crc = zlib.crc32(data, self._crc)
        return self._file.write(data)

    @property
    def digest(self) -> str:
        return f"{self._crc:08x}"


def file_digest(path: Path) -> str:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(BLOCK_BYTES):
            crc = zlib.crc32(block, crc)
    return f"{crc:08x}"


# Sealed JSON files


def write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    """Write values with their digest as JSON, atomically."""
    write_text(path, json.dumps(seal(values), indent=1))


def read_sealed(path: Path, remedy: str) -> dict[str, Any]:
    """Return the values of a sealed file; BadFile if they are not those that were written."""
    values = read_json_object(path)
    fault = "damaged: not a JSON object" if values is None else seal_fault(values)
    if values is None or fault:
        raise BadFile(f"{path}: {fault}. {remedy}")
    return values


def check_file(path: Path, head: str, expected: Any, remedy: str) -> None:
    """Raise BadFile unless a file has the digest that the sealed file `head` beside it says."""
    digest_now = file_digest(path)
    if digest_now != expected:
        raise BadFile(
            f"{path}: damaged: its bytes have the digest {digest_now}, {head} says {expected}. {remedy}"
        )


def check_beside(path: Path, remedy: str) -> None:
    """Raise BadFile if weights of a run are damaged; weights that no sealed file lies beside are not ours."""
    for head in (PROGRESS, METRICS):
        if (beside := path.with_name(head)).is_file():
            values = read_json_object(beside)
            if values is not None and not {FILES, SEAL} & values.keys():
                continue  # somebody else's
            digests = read_sealed(beside, remedy).get(FILES, {})
            if path.name in digests:
                check_file(path, head, digests[path.name], remedy)


def folder_faults(folder: Path, head: str, remedy: str) -> Iterator[str]:
    """Yield what is wrong with a folder of files and the sealed file with their digests."""
    digests: dict[str, Any] = {}
    yield from fault_of(lambda: digests.update(read_sealed(folder / head, remedy).get(FILES, {})))
    for name in digests:
        yield from fault_of(partial(check_file, folder / name, head, digests[name], remedy))


def fault_of(check: Callable[[], object]) -> Iterator[str]:
    try:
        check()
    except (BadFile, FileNotFoundError) as error:
        yield str(error)


# Arrays


def write_array(path: Path, array: NDArray[Any], *, suffix: str = "partial") -> None:
    """Write an array as .npy, atomically; after its values come the four bytes of its CRC-32."""
    with atomic_write(path, suffix=suffix) as partial, partial.open("wb") as file:
        digesting = DigestingFile(file)
        np.save(digesting, array, allow_pickle=False)
        file.write(bytes.fromhex(digesting.digest))


def read_array(path: Path, what: str, remedy: str) -> NDArray[Any]:
    """Return an array of `write_array`, mapped from disk; BadFile if its bytes are not those written."""
    with parse_errors(path, what, remedy):
        array: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    crc, end = 0, path.stat().st_size - CRC_BYTES
    with path.open("rb") as file:
        while block := file.read(min(BLOCK_BYTES, max(0, end - file.tell()))):
            crc = zlib.crc32(block, crc)
        if file.read() != crc.to_bytes(CRC_BYTES, "big"):
            raise BadFile(f"{path}: damaged: its last bytes are not the digest of the others. {remedy}")
    return array


# Arrays in one file

ALIGNMENT = 64
LOCAL_HEADER = 30
"""Bytes before the name of a file in a zip archive."""
ZIP64_BYTES = 20
"""Bytes with which zipfile describes sizes above 4 GB."""
PADDING = 0x6270
"""The kind of an extra field that no program looks at."""


def write_arrays(file: IO[bytes], arrays: Mapping[str, NDArray[Any]], *, mapped: bool) -> None:
    """Write arrays as an .npz: compressed, or to be mapped, each at a multiple of 64 bytes."""
    with zipfile.ZipFile(file, "w") as archive:
        for name, array in arrays.items():
            entry = zipfile.ZipInfo(f"{name}.npy")
            entry.compress_type = zipfile.ZIP_STORED if mapped else zipfile.ZIP_DEFLATED
            start = file.tell() + LOCAL_HEADER + len(entry.filename) + ZIP64_BYTES + 4
            fill = -start % ALIGNMENT
            entry.extra = struct.pack("<HH", PADDING, fill) + bytes(fill)
            with archive.open(entry, "w", force_zip64=True) as member:
                np.lib.format.write_array(member, np.ascontiguousarray(array), allow_pickle=False)


class ArrayFile:
    """The arrays of an .npz, by name. Those written for it are mapped: processes share one copy in RAM."""

    def __init__(self, file: IO[bytes]) -> None:
        found = np.load(file, allow_pickle=False)
        if not isinstance(found, np.lib.npyio.NpzFile) or found.zip is None:
            raise UserError("it is a single array")
        self._found, self._zip = found, found.zip
        self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def __contains__(self, name: str) -> bool:
        return name in self._found

    def __getitem__(self, name: str) -> NDArray[Any]:
        entry = self._zip.getinfo(f"{name}.npy")
        (name_bytes, extra_bytes) = struct.unpack_from("<HH", self._bytes, entry.header_offset + 26)
        start = entry.header_offset + LOCAL_HEADER + name_bytes + extra_bytes
        if entry.compress_type != zipfile.ZIP_STORED or start % ALIGNMENT:
            return np.asarray(self._found[name])
        with memoryview(self._bytes)[start : start + entry.file_size] as data:
            if zlib.crc32(data) != entry.CRC:
                raise zipfile.BadZipFile(f"{name} has another checksum")
            head = io.BytesIO(data[: 2**16])
        if np.lib.format.read_magic(head) != (1, 0):
            raise zipfile.BadZipFile(f"{name} is of another version of .npy")
        shape, is_fortran, dtype = np.lib.format.read_array_header_1_0(head)
        count = int(np.prod(shape, dtype=np.int64))
        if is_fortran or dtype.hasobject or head.tell() + count * dtype.itemsize != entry.file_size:
            raise zipfile.BadZipFile(f"{name} has other values than its header says")
        if not count:
            return np.empty(shape, dtype)
        return np.frombuffer(self._bytes, dtype, count, start + head.tell()).reshape(shape)
