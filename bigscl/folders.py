"""Folders that appear whole and vanish whole, whatever moment a crash falls into."""

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bigscl.files import name_os_errors, sync


@contextmanager
def atomic_folder(path: Path, check: Callable[[], object] = lambda: None) -> Iterator[Path]:
    """Yield a temporary folder to fill; it is synced and renamed to `path` if the block succeeds.

    An older folder at `path` is replaced. `check` is called right before the renaming and may raise: then
    everything stays as it was.
    """
    repair_folder(path)
    partial, old = _hidden(path, "partial"), _hidden(path, "old")
    try:
        with name_os_errors(path, partial):
            partial.mkdir(parents=True)
        yield partial
        for each in (*sorted(partial.rglob("*")), partial):
            with name_os_errors(path / each.relative_to(partial), each):
                sync(each)
        check()
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    if path.exists():
        _rename(path, old)
    _rename(partial, path)
    sync(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def repair_folder(path: Path) -> None:
    """Complete or undo what a crash interrupted: afterwards the folder is there whole, or gone."""
    old = _hidden(path, "old")
    if old.exists() and not path.exists():
        _rename(old, path)  # the crash fell between the two renames
    for leftover in (_hidden(path, "partial"), old, _hidden(path, "removed")):
        shutil.rmtree(leftover, ignore_errors=True)


def remove_folder(path: Path) -> None:
    """Remove a folder with all of its files, from one moment to the next."""
    removed = _hidden(path, "removed")
    shutil.rmtree(removed, ignore_errors=True)
    with name_os_errors(path):
        _rename(path, removed)
        sync(path.parent)
    shutil.rmtree(removed, ignore_errors=True)


def rename_folder(path: Path, name: Path) -> None:
    """Give a folder another name; a folder that has it already is removed."""
    shutil.rmtree(name, ignore_errors=True)
    _rename(path, name)


def find_folder(path: Path) -> Path:
    """Return where to read the folder: at its path, or under the old folder's name while it is replaced."""
    old = _hidden(path, "old")
    return old if old.is_dir() and not path.is_dir() else path


def _rename(folder: Path, name: Path) -> None:
    """Rename a folder; tests kill the process before and after every call."""
    folder.rename(name)


def _hidden(path: Path, what: str) -> Path:
    return path.with_name(f".{path.name}.{what}")
