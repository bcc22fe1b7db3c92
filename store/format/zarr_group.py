"""The Zarr arrays of one group: whole versions of shards in, whole versions out."""

import asyncio
import errno
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal, Self

import numpy as np
import zarr
from zarr.abc.store import RangeByteRequest
from zarr.codecs import BloscCodec, BloscShuffle, Crc32cCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync

from bigscl.store.backends.backend import Backend, MemoryBackend
from bigscl.store.epoch.threads import Check, nothing, pauses
from bigscl.store.errors import BadFile, ChunkCorrupt, storage_error
from bigscl.store.format.checksums import WatchedStore, digest, watched
from bigscl.store.format.fields import Fields, seal
from bigscl.store.format.layout import ArrayPlan, array_plans
from bigscl.store.format.quantize import LEVELS, from_bytes, to_bytes
from bigscl.store.format.spec import Array, Codec, GroupSpec, Rows, StoreSpec

logger = logging.getLogger(__name__)

STALE_SECONDS = 60.0
"""How long caches of NFS and FUSE may show a file that another node has renamed over: NFS's acregmax."""
REMEDY = "Restore it from a copy, or create the store again at another place."
# Nested chunk folders make deletes slow.
CHUNK_KEYS: Any = {"name": "default", "separator": "."}
# zarr's, of every codec from numcodecs. For good: to catch warnings in a block is not safe among threads.
warnings.filterwarnings("ignore", "Numcodecs codecs are not in the Zarr version 3 specification")


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


def create_array(
    backend: Backend,
    path: str,
    plan: ArrayPlan,
    compressors: list[Any] | None,
) -> None:
    """An empty Zarr array: metadata only."""
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
    for plan in array_plans(spec, group):
        create_array(backend, f"{group.name}/{plan.name}", plan, codecs(group))


def open_array(store: WatchedStore, path: str, mode: Literal["r", "r+"]) -> zarr.Array[Any]:
    """An array that writes a chunk even where all values equal the fill: what is missing must be a fault."""
    opened: Any = zarr.open_array(store, path=path, mode=mode)
    # As Array.with_config, which zarr has since 3.1.6 and so only beside numpy 2.
    return zarr.Array(
        zarr.AsyncArray(opened.metadata, opened.store_path, config={"write_empty_chunks": True})
    )


def metadata_fault(array: zarr.Array[Any], plan: ArrayPlan, group: GroupSpec) -> str | None:
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
    """One array group, opened."""

    def __init__(self, backend: Backend, spec: StoreSpec, group: GroupSpec, *, read_only: bool) -> None:
        self.spec = group
        self._store_spec = spec
        self._backend = backend
        self.plans = array_plans(spec, group)
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
        group = GroupSpec.from_fields(
            Fields.parse(data, place, REMEDY).inside("attributes").inside("bigscl").sealed()
        )
        if group.name != name:
            raise BadFile(f"{place}: describes {group.name!r:.40}, expected {name!r}. {REMEDY}")
        try:
            return cls(backend, spec, group, read_only=read_only)
        except (
            OSError,
            LookupError,
            ArithmeticError,
            TypeError,
            ValueError,
            AttributeError,
            RecursionError,
        ) as error:
            # What zarr raises for metadata that is missing or is not its own.
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
        wanted = [plan for plan in self.plans if names is None or plan.name in names]
        known = digests or {}
        return {
            plan.name: self._read_whole(plan, shard, slot, known.get(plan.name), check) for plan in wanted
        }

    def _read_whole(
        self, plan: ArrayPlan, shard: int, slot: int, expected: int | None, check: Check
    ) -> Array:
        values = self._read_version(plan, shard, slot, expected)
        if values is None and not self._waited_in_vain:
            place = f"{self._backend.url}/{self.spec.name}/{plan.name}"
            logger.warning(
                "%s: shard %d, slot %d is of another version; reading it again", place, shard, slot
            )
            for _ in pauses(STALE_SECONDS, check):
                values = self._read_version(plan, shard, slot, expected)
                if values is not None or self._waited_in_vain:
                    break
        if values is None:
            self._waited_in_vain = True
            reason = "whole, but not the version that the snapshot names (overwritten, or stale)"
            raise self.corrupt(plan.name, shard, slot, reason)
        return values

    def _read_version(self, plan: ArrayPlan, shard: int, slot: int, expected: int | None) -> Array | None:
        """An array of one version; None if what is there, or is shown, is another version."""
        try:
            with watched() as checksums:
                values = self._read_one(plan, shard, slot)
        except ChunkCorrupt as error:
            # NFS: the file was renamed over while it was open.
            if isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.ESTALE:
                return None
            raise
        is_it = expected is None or self._digest(plan, shard, slot, checksums) == expected
        return values if is_it else None

    def peek(self, places: Sequence[tuple[int, int, int]]) -> dict[str, Array]:
        """Single rows, given as (shard, slot, position), without the rest of their chunks.

        Their checksums are not compared. Only for chunks that are not compressed.
        """
        assert self.spec.codec == "none"
        parts = [self._bytes_of(plan, *place) for plan in self.plans for place in places]

        async def read() -> list[Any]:
            prototype = default_buffer_prototype()
            return await asyncio.gather(*(self._files.get(key, prototype, part) for key, part in parts))

        found, values = iter(sync(read())), {}
        for plan in self.plans:
            rows = [next(found) for _ in places]
            for (shard, slot, _), row in zip(places, rows, strict=True):
                if row is None or len(row) != plan.row_bytes:
                    raise self.corrupt(plan.name, shard, slot, "a chunk file is missing or too short")
            content = b"".join(row.to_bytes() for row in rows)
            values[plan.name] = np.frombuffer(content, plan.dtype).reshape(-1, *plan.shape[3:]).copy()
        return values

    def _bytes_of(
        self, plan: ArrayPlan, shard: int, slot: int, position: int
    ) -> tuple[str, RangeByteRequest]:
        """The file of a row, and its bytes in there."""
        part, place = divmod(position, plan.chunks[2])
        start = place * plan.row_bytes
        return self._key(plan, shard, slot, part), RangeByteRequest(start, start + plan.row_bytes)

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
                    found[plan.name][rows] = self._read_one(plan, shard, slot, rows)
        return found

    def _read_one(self, plan: ArrayPlan, shard: int, slot: int, rows: slice = slice(None)) -> Array:
        try:
            values: Array = np.asarray(self._arrays[plan.name][slot, shard, rows])
        except (ValueError, RuntimeError, OSError) as error:
            # zarr and its codecs raise these for a wrong checksum, wrong length, or undecodable bytes.
            raise self.corrupt(plan.name, shard, slot, str(error).rstrip(".")) from error
        values = from_bytes(values) if plan.rounded else values
        if self._shows_fill(plan, values):
            raise self.corrupt(plan.name, shard, slot, "a chunk file is missing")
        if not values.flags.writeable:
            values = values.copy()
        return values

    def _shows_fill(self, plan: ArrayPlan, values: Array) -> bool:
        """Whether a chunk was not there: it then reads as its fill value, which is no valid value."""
        firsts = values.reshape(len(values), -1)[:: plan.chunks[2], 0]
        return bool(np.isnan(firsts).any() if plan.dtype.kind == "f" else (firsts == plan.fill).any())

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
        """Put one version into a slot; gives the digests of its arrays, none where chunks lack checksums."""
        digests: dict[str, int] = {}
        for plan in self.plans:
            with watched() as checksums:
                self._write_one(plan, shard, slot, rows)
            if self.spec.checksum:
                digests[plan.name] = self._digest(plan, shard, slot, checksums)
        return digests

    def _write_one(self, plan: ArrayPlan, shard: int, slot: int, rows: Rows) -> None:
        values = rows[plan.name]
        try:
            self._arrays[plan.name][slot, shard] = to_bytes(values) if plan.rounded else values
        except OSError as error:
            what = f"{self._backend.url}/{self.spec.name}/{plan.name}: shard {shard} could not be written"
            raise storage_error(what, error) from error

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
