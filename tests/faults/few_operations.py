"""Storage operations in all their guises, one after the other, for the injector to see."""

import os
import shutil
from pathlib import Path

BYTES = b"0123456789"


def perform(folder):
    """Ten bytes in many ways; `NAMES` says what the injector must have seen."""
    here = Path(folder)
    here.mkdir()
    here.mkdir(exist_ok=True)
    (here / "text").write_text(BYTES.decode())
    with open(here / "bytes", "wb") as file:
        file.write(BYTES)
        file.flush()
        os.fsync(file.fileno())
    number = os.open(here / "low", os.O_WRONLY | os.O_CREAT)
    os.write(number, BYTES)
    os.ftruncate(number, 5)
    os.close(number)
    os.link(here / "low", here / "linked")
    (here / "low").replace(here / "bytes")
    (here / "missing").unlink(missing_ok=True)
    (here / "below").mkdir()
    (here / "below" / "file").touch()
    shutil.rmtree(here / "below")
    here.parent.joinpath("elsewhere").write_text("not counted")


NAMES = [
    "mkdir",
    *("create", "write"),
    *("create", "write", "fsync"),
    *("create", "write", "ftruncate"),
    "link",
    "replace",
    "mkdir",
    "create",
    *("unlink", "rmdir"),
]
