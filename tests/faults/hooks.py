"""Makes an injector see the storage operations of this process: patches what Python code calls for them."""

import builtins
import functools
import io
import os
import sys
from collections.abc import Callable
from typing import Any

from tests.faults.injector import Injector, Plan

REAL_OPEN = io.open
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC


def arm(plan: Plan) -> Injector:
    """Carry out the plan in this process, for the rest of its life."""
    injector = Injector(plan)
    _patch_paths(injector)
    _patch_descriptors(injector)
    _patch_open(injector)
    _patch_libraries(injector)
    _patch_objects(injector)
    return injector


def _absolute(path: Any, folder: int | None = None) -> str:
    if isinstance(path, int):
        try:
            return os.readlink(f"/proc/self/fd/{path}")
        except OSError:
            return ""
    text = os.fsdecode(path)
    if folder is not None and not os.path.isabs(text):
        text = os.path.join(_absolute(folder), text)
    return os.path.abspath(text)


# A call that changes nothing (a folder that is there already) is no operation.
POINTLESS: dict[str, Callable[[str], bool]] = {
    "mkdir": os.path.lexists,
    "unlink": lambda path: not os.path.lexists(path),
    "remove": lambda path: not os.path.lexists(path),
    "rmdir": lambda path: not os.path.lexists(path),
    "truncate": lambda path: False,
}


def _patch_paths(injector: Injector) -> None:
    """Calls that name a path or two."""

    def of_one(name: str, real: Any) -> Any:
        @functools.wraps(real)
        def call(path: Any, *rest: Any, **named: Any) -> Any:
            where = _absolute(path, named.get("dir_fd"))
            if not injector.counts(where) or POINTLESS[name](where):
                return real(path, *rest, **named)
            return injector.perform(name, where, lambda: real(path, *rest, **named))

        return call

    def of_two(name: str, real: Any) -> Any:
        @functools.wraps(real)
        def call(old: Any, new: Any, *rest: Any, **named: Any) -> Any:
            where = _absolute(new, named.get("dst_dir_fd"))
            return injector.perform(name, where, lambda: real(old, new, *rest, **named))

        return call

    for name in POINTLESS:
        setattr(os, name, of_one(name, getattr(os, name)))
    for name in ("rename", "replace", "link", "symlink"):
        setattr(os, name, of_two(name, getattr(os, name)))


def _patch_descriptors(injector: Injector) -> None:
    """Calls that name an open file."""
    real_write, real_open = os.write, os.open

    def of_descriptor(name: str, place: int, real: Any) -> Any:
        @functools.wraps(real)
        def call(*given: Any, **named: Any) -> Any:
            number = given[place] if isinstance(given[place], int) else given[place].fileno()
            return injector.perform(name, _absolute(number), lambda: real(*given, **named))

        return call

    def write(number: int, data: Any) -> int:
        half = memoryview(data).cast("B")[: len(data) // 2]
        found: int = injector.perform(
            "write", _absolute(number), lambda: real_write(number, data), lambda: real_write(number, half)
        )
        return found

    def open_descriptor(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        where = _absolute(path, named.get("dir_fd"))
        if not flags & WRITING or not injector.counts(where):
            return real_open(path, flags, *rest, **named)
        found: int = injector.perform("create", where, lambda: real_open(path, flags, *rest, **named))
        return found

    for name in ("fsync", "fdatasync", "ftruncate"):
        setattr(os, name, of_descriptor(name, 0, getattr(os, name)))
    os.sendfile = of_descriptor("write", 0, os.sendfile)
    os.copy_file_range = of_descriptor("write", 1, os.copy_file_range)
    os.write, os.open = write, open_descriptor


class WatchedFile(io.FileIO):
    """A file whose writes are operations, when they reach it from the buffer above."""

    injector: Injector
    place: str

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        real = super().write
        found: int = self.injector.perform(
            "write", self.place, lambda: real(view), lambda: real(view[: len(view) // 2])
        )
        return found


def _patch_open(injector: Injector) -> None:
    """`open`, in all its guises: Path.open and Path.write_text call it as well."""

    def watched(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        closefd: bool = True,
        opener: Any = None,
    ) -> Any:
        where = _absolute(file) if set(mode) & set("wax+") else ""
        if not where or not injector.counts(where):
            return REAL_OPEN(file, mode, buffering, encoding, errors, newline, closefd, opener)
        plain = mode.replace("b", "").replace("t", "")
        make = functools.partial(WatchedFile, file, plain, closefd, opener)
        raw = make() if isinstance(file, int) else injector.perform("create", where, make)
        raw.injector, raw.place = injector, where
        if buffering == 0:
            return raw
        buffered = io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)
        if "b" in mode:
            return buffered
        text = io.TextIOWrapper(buffered, encoding, errors, newline, line_buffering=buffering == 1)
        text.mode = mode  # type: ignore[misc]
        return text

    builtins.open = io.open = watched


def _patch_libraries(injector: Injector) -> None:
    """Writers in Rust and C++, which open the file themselves: one operation each."""

    def saver(real: Any, place: int, error: Callable[[OSError], Exception]) -> Any:
        @functools.wraps(real)
        def save(*given: Any, **named: Any) -> Any:
            target = given[place] if len(given) > place else None
            if not isinstance(target, str | os.PathLike):
                return real(*given, **named)

            def tear() -> None:
                real(*given, **named)
                os.truncate(target, os.path.getsize(target) // 2)

            return injector.perform("save", _absolute(target), lambda: real(*given, **named), tear, error)

        return save

    if tensors := sys.modules.get("safetensors.torch"):
        broken = sys.modules["safetensors"].SafetensorError
        tensors.serialize_file = saver(  # type: ignore[attr-defined]
            tensors.serialize_file,
            1,
            lambda error: broken(
                f"Error while serializing: I/O error: {error.strerror} (os error {error.errno})"
            ),
        )
    if torch := sys.modules.get("torch"):
        torch.save = saver(  # type: ignore[attr-defined]
            torch.save,
            1,
            lambda error: RuntimeError("PytorchStreamWriter failed writing file data/0: file write failed"),
        )


def _patch_objects(injector: Injector) -> None:
    """Requests that change an object store, by its bucket and key."""
    import obstore

    def key_of(store: Any, path: Any) -> str:
        first = path if isinstance(path, str) else next(iter(path), "")
        prefix = getattr(store, "prefix", None)
        return f"s3://{store.config['bucket']}/" + "/".join(filter(None, (prefix, first)))

    def at_once(name: str, real: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            return injector.perform(name, key_of(given[0], given[1]), lambda: real(*given, **named))

        return call

    def awaited(name: str, real: Any) -> Any:
        async def call(*given: Any, **named: Any) -> Any:
            return await injector.request(name, key_of(given[0], given[1]), lambda: real(*given, **named))

        return call

    for name in ("put", "delete", "copy", "rename"):
        setattr(obstore, name, at_once(name, getattr(obstore, name)))
        setattr(obstore, f"{name}_async", awaited(name, getattr(obstore, f"{name}_async")))
