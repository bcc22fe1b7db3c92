"""A store in a bucket of an object store."""

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Self, TypeVar

import obstore
import zarr.abc.store
from obstore.exceptions import AlreadyExistsError, NotSupportedError, PreconditionError
from zarr.abc.store import ByteRequest
from zarr.core.buffer import Buffer, BufferPrototype
from zarr.storage import ObjectStore

from bigscl.store.backends.backend import Backend
from bigscl.store.backends.retries import NotImplementedByServer, RetryPolicy
from bigscl.store.backends.schemes import Location
from bigscl.store.errors import AlreadyExists

T = TypeVar("T")
DELETE_THREADS = 8


class ObjectBackend(Backend):
    """A prefix of a bucket; a PUT is durable and whole when it returns."""

    def __init__(self, location: Location) -> None:
        self.url = location.url.rstrip("/")
        place = f"{self.url} at {location.endpoint}" if location.endpoint else self.url
        self._patience = RetryPolicy(place, location.credentials)
        self._store = location.client(prefix=location.path.strip("/"))

    def zarr_store(self, *, read_only: bool) -> zarr.abc.store.Store:
        return RetryingStore(self._store, self._patience, read_only=read_only)

    def read(self, key: str) -> bytes | None:
        found = self._get(key)
        return None if found is None else found[0]

    def _get(self, key: str) -> tuple[bytes, dict[str, Any]] | None:
        """(bytes, version) of an object; S3 and Azure tell versions by entity tag, GCS by generation."""

        def get() -> tuple[bytes, dict[str, Any]]:
            found = obstore.get(self._store, key)
            version = {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name]}
            return bytes(found.bytes()), version

        try:
            return self._call(f"read {key}", get)
        except FileNotFoundError:
            return None

    def _put(self, key: str, data: bytes, mode: Any) -> None:

        self._call(f"write {key}", lambda: obstore.put(self._store, key, data, mode=mode))

    def _call(self, doing: str, operation: Callable[[], T]) -> T:
        return self._patience.call(doing, operation)

    def create(self, key: str, data: bytes) -> None:
        """A conditional PUT: of two writers, one fails.

        It may have succeeded and its answer got lost; a second try then finds our own bytes. `data` must
        therefore be unlike anything others write.
        """
        try:
            self._put(key, data, "create")
        except AlreadyExistsError:
            if self.read(key) != data:
                raise AlreadyExists(f"{self.url}/{key}: exists already") from None

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """A PUT on condition that the object is still the one that was read."""
        found = self._get(key)
        if found is None or found[0] != old:
            return False
        try:
            self._put(key, new, found[1])
        except (FileNotFoundError, PreconditionError):
            return self.read(key) == new
        except (NotSupportedError, NotImplementedByServer):
            return self._swap_unconditionally(key, new)
        return True

    def _swap_unconditionally(self, key: str, new: bytes) -> bool:
        """Delete and create, for servers without conditional updates.

        Between the read and the delete a third party's object may come and be deleted with the old one.
        """
        self.delete(key)
        try:
            self.create(key, new)
        except AlreadyExists:
            return False
        return True

    def replace(self, key: str, data: bytes) -> None:
        self._put(key, data, "overwrite")

    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove objects, those that are there; on S3 a thousand with one request."""
        paths = list(keys)
        named = paths[0] if len(paths) == 1 else f"{len(paths)} objects"
        try:
            self._call(f"delete {named}", lambda: obstore.delete(self._store, paths))
        except FileNotFoundError:
            # Servers without bulk requests stop at an object that is not there.
            with ThreadPoolExecutor(DELETE_THREADS, thread_name_prefix="store-delete") as pool:
                list(pool.map(self._delete_one, paths if len(paths) > 1 else ()))

    def _delete_one(self, key: str) -> None:

        with contextlib.suppress(FileNotFoundError):
            self._call(f"delete {key}", lambda: obstore.delete(self._store, key))

    def names(self, prefix: str) -> list[str]:

        found = self._call(
            f"list {prefix or 'the store'}",
            lambda: obstore.list_with_delimiter(self._store, prefix=prefix or None),
        )
        paths = [entry["path"] for entry in found["objects"]] + list(found["common_prefixes"])
        return sorted(path.rstrip("/").rpartition("/")[2] for path in paths)

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:

        def list_all() -> list[tuple[str, int]]:
            pages = obstore.list(self._store, prefix=prefix or None)
            return [(entry["path"], entry["size"]) for page in pages for entry in page]

        yield from self._call(f"list {prefix or 'the store'}", list_all)


def _retried(name: str, doing: str) -> Any:
    """Return the method of zarr's ObjectStore of this name, which works on one key, with retries."""
    above = getattr(ObjectStore, name)

    async def method(self: "RetryingStore", key: str, *args: Any, **kwargs: Any) -> Any:
        return await self._patience.wait_for(f"{doing} {key}", lambda: above(self, key, *args, **kwargs))

    return method


class RetryingStore(ObjectStore[Any]):
    """Zarr's ObjectStore, which retries what a bad connection spoils: each operation may be repeated."""

    def __init__(self, store: Any, patience: RetryPolicy, *, read_only: bool = False) -> None:
        super().__init__(store, read_only=read_only)
        self._patience = patience

    def with_read_only(self, read_only: bool = False) -> Self:
        return type(self)(self.store, self._patience, read_only=read_only)

    # The words complete "could not ... KEY".
    get = _retried("get", "read")
    set = _retried("set", "write")
    set_if_not_exists = _retried("set_if_not_exists", "write")
    exists = _retried("exists", "look for")
    getsize = _retried("getsize", "look for")
    delete = _retried("delete", "delete")

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        above, wanted = super().get_partial_values, list(key_ranges)
        return await self._patience.wait_for("read parts of objects", lambda: above(prototype, wanted))

    async def delete_dir(self, prefix: str) -> None:
        above = super().delete_dir
        await self._patience.wait_for(f"delete {prefix}", lambda: above(prefix))

    def list(self) -> AsyncGenerator[str, None]:
        return self._listed("list the store", super().list)

    def list_prefix(self, prefix: str) -> AsyncGenerator[str, None]:
        above = super().list_prefix
        return self._listed(f"list {prefix}", lambda: above(prefix))

    def list_dir(self, prefix: str) -> AsyncGenerator[str, None]:
        above = super().list_dir
        return self._listed(f"list {prefix}", lambda: above(prefix))

    async def _listed(self, doing: str, start: Callable[[], AsyncIterator[str]]) -> AsyncGenerator[str, None]:
        """All of a listing, before the first of it: one that breaks off starts again."""

        async def collect() -> tuple[str, ...]:
            return tuple([name async for name in start()])

        for name in await self._patience.wait_for(doing, collect):
            yield name
