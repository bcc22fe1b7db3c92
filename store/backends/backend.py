"""Where a store's bytes live: a file system, an object store, or memory.

Zarr reads and writes the chunks. This module adds what Zarr lacks: files that are created whole and only
once, syncing, listing and sizes.
"""

import contextlib
import errno
import functools
import os
import shutil
import threading
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlparse

import zarr.abc.store
from zarr.core.buffer import Buffer, cpu
from zarr.storage import LocalStore, MemoryStore

from bigscl.common.url_secrets import public
from bigscl.store.backends.schemes import STORE_SCHEMES, Location, StorageOptions
from bigscl.store.errors import AlreadyExists, NotAStore, StorageFailed, StoreError, storage_errors

FILE_THREADS = 8
PROBES = 3
# What the kernel and FUSE answer where a file system cannot do it.
NO_HARD_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
P = ParamSpec("P")
T = TypeVar("T")


class Backend(ABC):
    """Small files and a Zarr store under one prefix. Keys use '/' and are relative to the prefix."""

    url: str

    @abstractmethod
    def zarr_store(self, *, read_only: bool) -> zarr.abc.store.Store:
        """A Zarr store over the same files."""

    @abstractmethod
    def read(self, key: str) -> bytes | None:
        """The file's bytes, or None if there is none."""

    @abstractmethod
    def create(self, key: str, data: bytes) -> None:
        """Create a file, whole and durable, or raise AlreadyExists."""

    @abstractmethod
    def replace(self, key: str, data: bytes) -> None:
        """Create or overwrite a file; readers see the old or the new bytes, never a mixture."""

    @abstractmethod
    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove files, those that are there."""

    @abstractmethod
    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """Replace a file's content if it is exactly `old`; of several writers, one gets True.

        `new` must be unlike anything others write: where an answer got lost, finding it there is success.
        """

    @abstractmethod
    def names(self, prefix: str) -> list[str]:
        """Sorted names directly below a prefix, files and folders alike."""

    @abstractmethod
    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        """(key, bytes) of every file below a prefix."""

    def delete(self, key: str) -> None:
        self.delete_many([key])

    def delete_tree(self, prefix: str) -> None:
        self.delete_many([key for key, _ in self.sizes(prefix)])

    def sync(self, keys: Iterable[str]) -> None:
        """Return when these files will survive a power cut, if they would not anyway."""
        return


def _own_errors(method: Callable[P, T]) -> Callable[P, T]:
    """Raise errors of the file system as StorageFailed, with the place."""

    @functools.wraps(method)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        backend: Any = args[0]
        with storage_errors(backend.url):
            return method(*args, **kwargs)

    return wrapped


class LocalBackend(Backend):
    """A directory, on a local disk or a shared file system."""

    def __init__(self, root: Path) -> None:
        self.root = root.absolute()
        self.url = str(self.root)

    def zarr_store(self, *, read_only: bool) -> zarr.abc.store.Store:
        """Zarr's LocalStore, which writes to a temporary name and renames."""
        return LocalStore(self.root, read_only=read_only)

    @_own_errors
    def read(self, key: str) -> bytes | None:
        try:
            return (self.root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    @_own_errors
    def create(self, key: str, data: bytes) -> None:
        """Temporary name, sync, link: the link fails if the name is taken."""
        path = self.root / key
        with self._written(path, data) as temporary:
            try:
                self._link(temporary, path)
            except FileExistsError:
                raise AlreadyExists(f"{path}: exists already") from None
        self._sync_folder_of(path)

    @_own_errors
    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        """Move the file to a private name, compare, link the new one; put it back if it is not `old`.

        For that moment readers see no file. A crash in it leaves none, which for a lease means: released.
        """
        path = self.root / key
        if self.read(key) != old:
            return False
        with self._written(path, new) as temporary, self._private_name(path) as taken:
            try:
                path.rename(taken)
                swapped = taken.read_bytes() == old
                self._link(temporary if swapped else taken, path)
            except (FileNotFoundError, FileExistsError):
                return False
        self._sync_folder_of(path)
        return swapped

    @_own_errors
    def replace(self, key: str, data: bytes) -> None:
        """Temporary name, sync, rename."""
        path = self.root / key
        with self._written(path, data) as temporary:
            temporary.replace(path)

    @staticmethod
    def _link(private: Path, path: Path) -> None:
        """Give a file its name. NFS may do it, lose the answer, ask again, and say that the name is taken."""
        try:
            os.link(private, path)
        except OSError as error:
            if path.exists() and path.samefile(private):
                return
            if error.errno in NO_HARD_LINKS:
                raise StorageFailed(
                    f"{path.parent}: this file system has no hard links ({error.strerror}), which commits "
                    f"need. Choose a folder on another one, or, for a mounted bucket, the bucket itself "
                    f"(store.url: s3://bucket/prefix)."
                ) from error
            raise

    def _sync_folder_of(self, path: Path) -> None:
        try:
            self._sync_one(path.parent)
        except OSError as error:
            raise StoreError(
                f"{path}: was written and has its name, but may not survive a power cut: its folder could "
                f"not be synced ({error.strerror}). Check the disk, then resume."
            ) from error

    @contextlib.contextmanager
    def _written(self, path: Path, data: bytes) -> Iterator[Path]:
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._private_name(path) as temporary:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            yield temporary

    @staticmethod
    @contextlib.contextmanager
    def _private_name(path: Path) -> Iterator[Path]:
        """A name next to the path that nobody else uses; what is there in the end is removed."""
        private = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
        try:
            yield private
        finally:
            with contextlib.suppress(OSError):
                private.unlink(missing_ok=True)

    @_own_errors
    def delete(self, key: str) -> None:
        path = self.root / key
        path.unlink(missing_ok=True)
        if path.parent.exists():
            self._sync_one(path.parent)

    @_own_errors
    def delete_many(self, keys: Iterable[str]) -> None:
        """Remove files in threads, then sync the folders they were in."""
        paths = [self.root / key for key in keys]
        folders = {path.parent for path in paths}
        with ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="store-delete") as pool:
            list(pool.map(lambda path: path.unlink(missing_ok=True), paths))
            list(pool.map(self._sync_one, (folder for folder in folders if folder.exists())))

    @_own_errors
    def delete_tree(self, prefix: str) -> None:
        path = self.root / prefix
        if path.exists():
            shutil.rmtree(path)

    @_own_errors
    def names(self, prefix: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root / prefix))
        except (FileNotFoundError, NotADirectoryError):
            if self.root.is_file():
                raise NotAStore(f"{self.root}: a file, expected a folder. Check the path.") from None
            return []

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        for folder, _, names in os.walk(self.root / prefix):
            for name in names:
                path = Path(folder, name)
                with contextlib.suppress(FileNotFoundError):
                    yield str(path.relative_to(self.root)), path.stat().st_size

    @_own_errors
    def sync(self, keys: Iterable[str]) -> None:
        """Files first, then the folders that name them."""
        paths = [self.root / key for key in keys]
        with ThreadPoolExecutor(FILE_THREADS, thread_name_prefix="store-sync") as pool:
            list(pool.map(self._sync_one, paths))
            list(pool.map(self._sync_one, {path.parent for path in paths}))

    @staticmethod
    def _sync_one(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


class MemoryBackend(Backend):
    """Files in the memory of this process; they end with it."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._files: dict[str, Buffer] = {}
        self._lock = threading.Lock()

    def zarr_store(self, *, read_only: bool) -> zarr.abc.store.Store:
        return MemoryStore(self._files, read_only=read_only)

    def read(self, key: str) -> bytes | None:
        found = self._files.get(key)
        return None if found is None else found.to_bytes()

    def create(self, key: str, data: bytes) -> None:
        with self._lock:
            if key in self._files:
                raise AlreadyExists(f"{self.url}/{key}: exists already")
            self._files[key] = cpu.Buffer.from_bytes(data)

    def swap(self, key: str, old: bytes, new: bytes) -> bool:
        with self._lock:
            if self.read(key) != old:
                return False
            self._files[key] = cpu.Buffer.from_bytes(new)
        return True

    def replace(self, key: str, data: bytes) -> None:
        with self._lock:
            self._files[key] = cpu.Buffer.from_bytes(data)

    def delete_many(self, keys: Iterable[str]) -> None:
        for key in list(keys):
            self._files.pop(key, None)

    def names(self, prefix: str) -> list[str]:
        skip = len(prefix) + 1 if prefix else 0
        return sorted({key[skip:].split("/")[0] for key in self._below(prefix)})

    def sizes(self, prefix: str) -> Iterator[tuple[str, int]]:
        for key in self._below(prefix):
            yield key, len(self._files[key])

    def _below(self, prefix: str) -> list[str]:
        return [key for key in list(self._files) if not prefix or key.startswith(f"{prefix}/")]


# Named memory stores can be opened again by the same process, like the others.
_memories: dict[str, MemoryBackend] = {}


def open_backend(url: str | os.PathLike[str], options: StorageOptions | None = None) -> Backend:
    """The place that a URL names: a path, file://, s3:// gs:// or az://bucket/prefix, or memory://name."""
    text = os.fspath(url)
    parsed = urlparse(text)
    if "://" not in text:
        return LocalBackend(Path(text))
    if parsed.scheme == "file":
        return LocalBackend(Path(parsed.netloc + parsed.path))
    if parsed.scheme == "memory":
        return _memories.setdefault(text, MemoryBackend(text))
    if parsed.scheme in STORE_SCHEMES:
        from bigscl.store.backends.object_store import ObjectBackend

        return ObjectBackend(Location.parse(text, options))
    raise StoreError(
        f"{public(text)}: no stores behind {parsed.scheme!r}. Use a path, file://, memory://name, or "
        f"{', '.join(f'{scheme}://' for scheme in STORE_SCHEMES)} with bucket/prefix."
    )


def check_creates_once(backend: Backend) -> None:
    """Raise StorageFailed if a file can be created twice here: two runs would both commit one snapshot.

    Tried on a name of its own. Whoever tidies up here meanwhile may delete that, and it is free again: the
    place is refused if it happens each time.
    """
    for _ in range(PROBES):
        key = f"probe.{uuid.uuid4().hex}.partial"
        try:
            backend.create(key, b"first")
            backend.create(key, b"second")
        except AlreadyExists:
            return
        finally:
            with contextlib.suppress(StoreError):
                backend.delete(key)
    raise StorageFailed(
        f"{backend.url}: a file that exists was created again, expected to be refused: this server ignores "
        f"conditions (If-None-Match), so two runs could overwrite each other's commits. Use a server that "
        f"honours them, or a store on disk."
    )


def forget_memory(url: str) -> None:
    _memories.pop(url, None)
