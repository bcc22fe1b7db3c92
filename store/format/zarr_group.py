"""The Zarr arrays of one group: whole versions of shards in, whole versions out.

A chunk ends in its CRC-32C. The digest of an array of a version is the CRC-32 over those four bytes of each
of its chunks, in order: it costs nothing to compute.
"""

import asyncio
import errno
import logging
import warnings
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import lru_cache
from typing import Any, Literal, Self

import numpy as np
import zarr
from zarr.abc.store import ByteRequest, RangeByteRequest, Store
from zarr.codecs import BloscCodec, BloscShuffle, Crc32cCodec, ZstdCodec
from zarr.core.buffer import Buffer, BufferPrototype, default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import WrapperStore

from bigscl.store.backends.backend import Backend, MemoryBackend
from bigscl.store.errors import BadFile, ChunkCorrupt, storage_error
from bigscl.store.format.fields import read_object, seal, to_dataclass
from bigscl.store.format.layout import ArrayPlan, stored_plans
from bigscl.store.format.quantize import LEVELS
from bigscl.store.format.spec import Array, Codec, GroupSpec, Rows, StoreSpec
from bigscl.store.threads import Check, nothing, pauses

logger = logging.getLogger(__name__)

STALE_SECONDS = 60.0
"""How long caches of NFS and FUSE may show a file that another node has renamed over: NFS's acregmax."""
REMEDY = "Restore it from a copy, or create the store again at another place."
CHECKSUM_BYTES = 4
ZARR_ERRORS = (OSError, LookupError, ArithmeticError, TypeError, ValueError, AttributeError, RecursionError)
"""Raised by zarr for metadata that is missing or is not its own."""
# Zarr moves chunks in a thread of its own, which runs each call in its caller's context.
_seen: ContextVar[dict[str, bytes] | None] = ContextVar("chunk checksums", default=None)
# Nested chunk folders make deletes slow.
CHUNK_KEYS: Any = {"name": "default", "separator": "."}
# zarr's, of every codec from numcodecs. For good: to catch warnings in a block is not safe among threads.
warnings.filterwarnings("ignore", "Numcodecs codecs are not in the Zarr version 3 specification")


class WatchedStore(WrapperStore[Store]):
    """A Zarr store that notes the last bytes of every whole chunk that passes through it."""

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        value = await self._store.get(key, prototype, byte_range)
        if value is not None and byte_range is None:
            _note(key, value)
        return value

    async def set(self, key: str, value: Buffer) -> None:
        await self._store.set(key, value)
        _note(key, value)


def _note(key: str, value: Buffer) -> None:
    seen = _seen.get()
    if seen is not None:
        seen[key] = value[-CHECKSUM_BYTES:].to_bytes()


@contextmanager
def watched() -> Iterator[dict[str, bytes]]:
    """The checksums of the chunks that this thread reads or writes in the block, by key."""
    seen: dict[str, bytes] = {}
    token = _seen.set(seen)
    try:
        yield seen
    finally:
        _seen.reset(token)


def digest(checksums: Iterable[bytes]) -> int:
    """The digest of an array of a version, from the checksums of its chunks in order."""
    return zlib.crc32(b"".join(checksums))


def codecs(group: GroupSpec) -> list[Any] | None:
    """The Zarr codecs behind the plain bytes of a chunk."""
    compression: dict[Codec, list[Any]] = {
        "none": [],
        "blosc": [BloscCodec(cname="lz4", clevel=5, shuffle=BloscShuffle.bitshuffle, typesize=2)],
        "zstd": [ZstdCodec(level=1)],
        "uint8": [ZstdCodec(level=1)],
    }
    return compression[group.codec] + ([Crc32cCodec()] if group.checksum else []) or None


def filters(plan: ArrayPlan) -> list[Any]:
    """The Zarr codecs before that: the difference to the cell before compresses better than the cell."""
    return [{"name": "numcodecs.delta", "configuration": {"dtype": "|u1"}}] if plan.rounded else []


def create_array(backend: Backend, path: str, plan: ArrayPlan, compressors: list[Any] | None) -> None:
    zarr.create_array(
        backend.zarr_store(read_only=False),
        name=path,
        shape=plan.shape,
        chunks=plan.chunks,
        dtype=plan.stored_dtype,
        fill_value=plan.fill,
        attributes={"values": LEVELS.tolist()} if plan.rounded else None,
        filters=filters(plan),
        compressors=compressors,
        chunk_key_encoding=CHUNK_KEYS,
    )


def describe_group(backend: Backend, spec: StoreSpec, group: GroupSpec) -> None:
    """Make the metadata of a group without any version in it."""
    store = backend.zarr_store(read_only=False)
    zarr.create_group(store, path=group.name, attributes={"bigscl": seal(group.to_json())})
    for plan in stored_plans(spec, group):
        create_array(backend, f"{group.name}/{plan.name}", plan, codecs(group))


def described(build: Callable[[Backend], None]) -> dict[str, bytes]:
    """Return the metadata files that `build` creates, by key."""
    scratch = MemoryBackend("memory://description")
    build(scratch)
    return {key: scratch.read(key) or b"" for key, _ in scratch.sizes("")}


def open_array(store: WatchedStore, path: str, mode: Literal["r", "r+"]) -> zarr.AsyncArray[Any]:
    """An array that writes a chunk even where all values equal the fill: what is missing must be a fault."""
    opened: Any = zarr.open_array(store, path=path, mode=mode)
    # As AsyncArray.with_config, which zarr has since 3.1.6 and so only beside numpy 2.
    return zarr.AsyncArray(opened.metadata, opened.store_path, config={"write_empty_chunks": True})


def all_at_once(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Return the result of each call, or its error; when this returns, none of them is running any more."""

    async def gather() -> list[Any]:
        return await asyncio.gather(*calls, return_exceptions=True)

    results: list[Any] = sync(gather())
    return results


def metadata_fault(
    array: zarr.AsyncArray[Any] | zarr.Array[Any], plan: ArrayPlan, group: GroupSpec
) -> str | None:
    """Return which part of an array's metadata is not as it was created; None if all is."""
    found: dict[str, Any] = dict(array.metadata.to_dict())
    expected = planned_metadata(plan, group).to_dict()
    # Others may add attributes of their own.
    found["attributes"] = {name: found["attributes"].get(name) for name in expected["attributes"]}
    for name, value in expected.items():
        if found.get(name) != value:
            return f"{name} is {found.get(name)!r:.80}, expected {value!r:.80}"
    return None


@lru_cache(maxsize=64)
def planned_metadata(plan: ArrayPlan, group: GroupSpec) -> Any:
    """The metadata of an array as this version of zarr creates it."""
    scratch = MemoryBackend("memory://description")
    create_array(scratch, plan.name, plan, codecs(group))
    return zarr.open_array(scratch.zarr_store(read_only=True), path=plan.name, mode="r").metadata


class ArrayGroup:
    def __init__(self, backend: Backend, spec: StoreSpec, group: GroupSpec, *, read_only: bool) -> None:
        self.spec = group
        self._store_spec = spec
        self._backend = backend
        self.plans = stored_plans(spec, group)
        store = self._files = WatchedStore(backend.zarr_store(read_only=read_only))
        self._arrays = {
            plan.name: open_array(store, f"{group.name}/{plan.name}", "r" if read_only else "r+")
            for plan in self.plans
        }
        # A store with damage is not waited for again and again.
        self._waited_in_vain = False
        for plan in self.plans:
            if fault := metadata_fault(self._arrays[plan.name], plan, group):
                raise BadFile(f"{backend.url}/{group.name}/{plan.name}/zarr.json: {fault}. {REMEDY}")

    @classmethod
    def open(cls, backend: Backend, spec: StoreSpec, name: str, *, read_only: bool) -> Self:
        """A group that a snapshot names."""
        place = f"{backend.url}/{name}/zarr.json"
        data = backend.read(f"{name}/zarr.json")
        if data is None:
            raise ChunkCorrupt(f"{place}: is missing, but a snapshot names this array group. {REMEDY}")
        described = read_object(data, place, REMEDY, "attributes", "bigscl")
        group = to_dataclass(GroupSpec, described, place, REMEDY)
        if group.name != name:
            raise BadFile(f"{place}: describes {group.name!r:.40}, expected {name!r}. {REMEDY}")
        try:
            return cls(backend, spec, group, read_only=read_only)
        except ZARR_ERRORS as error:
            raise ChunkCorrupt(
                f"{backend.url}/{name}: the zarr.json of an array cannot be read ({error!r:.200}). {REMEDY}"
            ) from error

    def read(
        self,
        shard: int,
        slot: int,
        names: tuple[str, ...] | None = None,
        digests: Mapping[str, int] | None = None,
        check: Check = nothing,
    ) -> dict[str, Array]:
        """The arrays of one version (or only those named); ChunkCorrupt names what is broken.

        `digests` say which version it must be: chunks that are whole but of another one are read again for
        as long as a cache may be stale, and then refused. `check` raises to end that.
        """
        wanted = [plan for plan in self.plans if names is None or not set(names).isdisjoint(plan.names)]
        known, arrays = digests or {}, {}
        for plan, values in zip(wanted, self._read_versions(wanted, shard, slot, known), strict=True):
            if values is None:
                values = self._read_again(plan, shard, slot, known, check)
            arrays.update(plan.from_stored(values))
        return {name: array for name, array in arrays.items() if names is None or name in names}

    def _read_again(
        self, plan: ArrayPlan, shard: int, slot: int, digests: Mapping[str, int], check: Check
    ) -> Array:
        """Read an array until the version that the snapshot names is there, for as long as caches may lag."""
        if not self._waited_in_vain:
            url = f"{self._backend.url}/{self.spec.name}/{plan.name}"
            logger.warning("%s: shard %d, slot %d is of another version; reading it again", url, shard, slot)
            for _ in pauses(STALE_SECONDS, check):
                (values,) = self._read_versions([plan], shard, slot, digests)
                if values is not None or self._waited_in_vain:
                    break
            if values is not None:
                return values
        self._waited_in_vain = True
        reason = "whole, but not the version that the snapshot names (overwritten, or stale)"
        raise self.corrupt(plan.name, shard, slot, reason)

    def _read_versions(
        self, plans: Sequence[ArrayPlan], shard: int, slot: int, digests: Mapping[str, int]
    ) -> list[Array | None]:
        """Read arrays of one version; None for one whose content, or what is shown of it, is another."""
        with watched() as checksums:
            results = all_at_once(self._arrays[plan.name].getitem((slot, shard)) for plan in plans)
        versions: list[Array | None] = []
        for plan, result in zip(plans, results, strict=True):
            expected = digests.get(plan.name)
            # NFS: the file was renamed over while it was open.
            is_stale = isinstance(result, OSError) and result.errno == errno.ESTALE
            values = None if is_stale else self._values(plan, shard, slot, result)
            is_other = expected is not None and self._digest(plan, shard, slot, checksums) != expected
            versions.append(None if is_other else values)
        return versions

    def peek(self, places: Sequence[tuple[int, int, int]]) -> dict[str, Array]:
        """Single rows (shard, slot, position) of uncompressed chunks; checksums are not compared."""
        assert self.spec.codec == "none"
        prototype, calls, values = default_buffer_prototype(), [], {}
        for plan in self.plans:
            for shard, slot, position in places:
                part, row = divmod(position, plan.chunks[2])
                wanted = RangeByteRequest(row * plan.row_bytes, (row + 1) * plan.row_bytes)
                calls.append(self._files.get(self._key(plan, shard, slot, part), prototype, wanted))
        results = iter(all_at_once(calls))
        for plan in self.plans:
            rows = [next(results) for _ in places]
            for (shard, slot, _), row in zip(places, rows, strict=True):
                if isinstance(row, BaseException):
                    raise row
                if row is None or len(row) != plan.row_bytes:
                    raise self.corrupt(plan.name, shard, slot, "a chunk file is missing or too short")
            content = b"".join(row.to_bytes() for row in rows)
            stored = np.frombuffer(content, plan.dtype).reshape(-1, *plan.shape[3:]).copy()
            values.update(plan.from_stored(stored))
        return values

    def _digest(self, plan: ArrayPlan, shard: int, slot: int, checksums: Mapping[str, bytes]) -> int:
        return digest(checksums.get(key, b"") for key in self._keys(plan, shard, slot))

    def unreadable(self, plan: ArrayPlan, shard: int, slot: int) -> Array:
        """Which rows of a version lie in chunks that cannot be read."""
        step = plan.chunks[2]
        bad = np.zeros(plan.shape[2], dtype=bool)
        for first in range(0, len(bad), step):
            try:
                self._read_one(plan, shard, slot, slice(first, first + step))
            except ChunkCorrupt:
                bad[first : first + step] = True
        return bad

    def readable(self, shard: int, slot: int, otherwise: Mapping[str, Array]) -> dict[str, Array]:
        """The arrays of one version, with other values where a chunk cannot be read."""
        found = {name: array.copy() for name, array in otherwise.items()}
        for plan in self.plans:
            for first in range(0, plan.shape[2], plan.chunks[2]):
                rows = slice(first, first + plan.chunks[2])
                with suppress(ChunkCorrupt):
                    values = self._read_one(plan, shard, slot, rows)
                    for name, array in plan.from_stored(values).items():
                        found[name][rows] = array
        return found

    def _read_one(self, plan: ArrayPlan, shard: int, slot: int, rows: slice) -> Array:
        (result,) = all_at_once([self._arrays[plan.name].getitem((slot, shard, rows))])
        return self._values(plan, shard, slot, result)

    def _values(self, plan: ArrayPlan, shard: int, slot: int, result: Any) -> Array:
        """Return the values of an array that was read; ChunkCorrupt if a chunk is missing or broken."""
        if isinstance(result, ValueError | RuntimeError | OSError):
            # zarr and its codecs raise these for a wrong checksum, wrong length, or undecodable bytes.
            raise self.corrupt(plan.name, shard, slot, str(result).rstrip(".")) from result
        if isinstance(result, BaseException):
            raise result
        values = np.asarray(result)
        # A chunk that was not there reads as its fill value, which is no valid value.
        firsts = values.reshape(len(values), -1)[:: plan.chunks[2], 0]
        if np.isnan(firsts).any() if values.dtype.kind == "f" else (firsts == plan.fill).any():
            raise self.corrupt(plan.name, shard, slot, "a chunk file is missing")
        return values if values.flags.writeable else values.copy()

    def corrupt(self, name: str, shard: int, slot: int, reason: str) -> ChunkCorrupt:
        """An error that names the chunk, the samples in it, and the way out."""
        ids = self._store_spec.sample_ids(shard)
        samples = f"samples {ids[0]} to {ids[-1]}" if len(ids) else "no samples"
        return ChunkCorrupt(
            f"{self._backend.url}/{self.spec.name}/{name}: shard {shard}, slot {slot} ({samples}): {reason}. "
            f"Run `bigscl verify` to see all damage. Resume from an older checkpoint, restore the chunk from "
            f"a copy, or reset its samples with `bigscl repair`."
        )

    def write(self, shard: int, slot: int, rows: Rows) -> dict[str, int]:
        """Put one version into a slot; return the digests of its arrays, none where chunks lack checksums."""
        values = {plan.name: plan.to_stored(rows) for plan in self.plans}
        with watched() as checksums:
            results = all_at_once(
                self._arrays[name].setitem((slot, shard), array) for name, array in values.items()
            )
        for name, result in zip(values, results, strict=True):
            if isinstance(result, OSError):
                what = f"{self._backend.url}/{self.spec.name}/{name}: shard {shard} could not be written"
                raise storage_error(what, result) from result
            if isinstance(result, BaseException):
                raise result
        if not self.spec.checksum:
            return {}
        return {plan.name: self._digest(plan, shard, slot, checksums) for plan in self.plans}

    def keys(self, shard: int, slot: int) -> Iterator[str]:
        """The files of one version, relative to the store."""
        for plan in self.plans:
            yield from self._keys(plan, shard, slot)

    def _keys(self, plan: ArrayPlan, shard: int, slot: int) -> Iterator[str]:
        for part in range(-(-plan.shape[2] // plan.chunks[2])):
            yield self._key(plan, shard, slot, part)

    def _key(self, plan: ArrayPlan, shard: int, slot: int, part: int) -> str:
        tail = ".0" * (len(plan.shape) - 3)
        return f"{self.spec.name}/{plan.name}/c.{slot}.{shard}.{part}{tail}"
