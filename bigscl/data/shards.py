"""Tar shards: patterns expanded to names, members found in open tars."""

import glob
import os
import re
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from braceexpand import braceexpand

from bigscl.data.remote import s3_bucket
from bigscl.data.sources import Shard, Unreadable, scheme
from store.retries import Patience

SUFFIXES = (".tar", ".tgz", ".tar.gz")
BLOCK = 512
MISSING = -2
# Entries that give the next one its name, and those that belong to the next one.
NAME_TYPES = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE)
EXTENSION_TYPES = (*NAME_TYPES, tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE)
LONGEST_NAME = 1 << 20


def local_bytes(url: str) -> int | None:
    """Length of a local shard, MISSING if it is not there, None for remote ones."""
    if scheme(url):
        return None
    return os.path.getsize(url) if os.path.isfile(url) else MISSING


def expand(shards: str | Sequence[str]) -> list[str]:
    """The shards that a pattern or a list of patterns names.

    Braces and lists keep their order; files found by a folder or a glob are sorted.
    """
    patterns = [shards] if isinstance(shards, str) else list(shards)
    urls: list[str] = []
    for pattern in patterns:
        for url in [pattern] if scheme(pattern) == "pipe" else braceexpand(pattern):
            urls += _found(url)
    if not urls:
        raise ValueError(
            f"{', '.join(patterns) or 'shards'}: no shards there. Expected {', '.join(SUFFIXES)}."
        )
    if len(set(urls)) < len(urls):
        twice = sorted({url for url in urls if urls.count(url) > 1})
        raise ValueError(f"{', '.join(twice)}: named more than once. Each shard is read once per epoch.")
    return urls


def _found(url: str) -> list[str]:
    kind = scheme(url)
    if kind == "s3" and (url.endswith("/") or _is_glob(url)):
        return _found_on_s3(url)
    if kind:
        return [url]
    path = url.removeprefix("file://")
    if os.path.isdir(path):
        return sorted(os.path.join(path, name) for name in os.listdir(path) if _is_shard(name))
    return sorted(glob.glob(path)) if _is_glob(path) and not os.path.exists(path) else [path]


def _is_glob(pattern: str) -> bool:
    return any(char in pattern for char in "*?[")


def _is_shard(name: str) -> bool:
    return name.endswith(SUFFIXES) and not name.startswith(".")


def _found_on_s3(url: str) -> list[str]:
    import obstore

    store, path = s3_bucket(url)
    bucket = url[: len(url) - len(path)]
    prefix = re.split(r"[*?[]", path)[0].rpartition("/")[0]

    def list_all() -> list[str]:
        return sorted(entry["path"] for page in obstore.list(store, prefix) for entry in page)

    names = Patience(url).call("list the shards", list_all)
    pattern = path if _is_glob(path) else path + "*"
    return [bucket + name for name in names if fnmatch(name, pattern) and _is_shard(os.path.basename(name))]


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar: its bytes are `size` from `offset` on."""

    name: str
    offset: int
    size: int

    def key_and_extension(self) -> tuple[str, str] | None:
        """(key, lower-case extension) as WebDataset has them: cut at the first dot; None for others."""
        match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", self.name)
        if not match or re.match(r"__[^/]*__($|/)", self.name):
            return None
        return match[1], match[2].lower()


def members(shard: Shard) -> Iterator[Member]:
    """The files of a tar, from front to back; raises Unreadable where it breaks off."""
    position, name = 0, None
    while any(header := bytes(shard.read_at(position, BLOCK))):
        info = _header(header, position)
        start = position + BLOCK
        if info.type in NAME_TYPES:
            name = _long_name(bytes(shard.read_at(start, info.size)), info.type) or name
        elif info.type in (tarfile.REGTYPE, tarfile.AREGTYPE):
            yield Member(name or info.name, start, info.size)
        if info.type not in EXTENSION_TYPES:
            name = None
        # Links and folders may state a size, but no bytes follow.
        follow = 0 if info.type in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE) else info.size
        position = start + -(-follow // BLOCK) * BLOCK


def _header(content: bytes, position: int) -> tarfile.TarInfo:
    try:
        info = tarfile.TarInfo.frombuf(content, "utf-8", "surrogateescape")
    except tarfile.TarError as error:
        raise Unreadable(f"no tar header at byte {position}: {error}") from error
    if info.size < 0 or (info.type in NAME_TYPES and info.size > LONGEST_NAME):
        raise Unreadable(f"no tar header at byte {position}: impossible size {info.size}")
    return info


def _long_name(payload: bytes, kind: bytes) -> str | None:
    """The name that a GNU or pax header gives the member after it, if it gives one."""
    if kind == tarfile.GNUTYPE_LONGNAME:
        return payload.rstrip(b"\0").decode("utf-8", "surrogateescape")
    while match := re.match(rb"(\d+) ([^=]+)=", payload):
        length = int(match[1])
        if match[2] == b"path":
            return payload[match.end() : length - 1].decode("utf-8", "surrogateescape")
        payload = payload[max(1, length) :]
    return None
