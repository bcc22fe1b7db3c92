"""Tar shards: patterns expanded to names, members found in open tars."""

import glob
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch

from braceexpand import braceexpand

from bigscl.common.text import first_few
from bigscl.common.url_secrets import take
from bigscl.common.user_error import UserError
from bigscl.data.open_tar import Shard, Unreadable, scheme
from bigscl.store import STORE_SCHEMES, list_objects

SUFFIXES = (".tar", ".tgz", ".tar.gz")
BLOCK = 512
MISSING = -2
# Entries that give the next one its name, and those that belong to the next one.
NAME_TYPES = (tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE)
EXTENSION_TYPES = (*NAME_TYPES, tarfile.GNUTYPE_LONGLINK, tarfile.XGLTYPE)
# Of a GNU or pax header, and of the name in it.
LONGEST_HEADER = 1 << 20
LONGEST_NAME = 4096
# Larger files are not read into memory.
LARGEST_LABEL_BYTES = 1 << 24
LARGEST_IMAGE_BYTES = 1 << 30
# Entries with a name but without content of their own that could be read.
HOLLOW_TYPES = (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.GNUTYPE_SPARSE)
# Damaged places after which the rest of a tar is given up.
MOST_DAMAGES = 100
# Bytes in which the next header is searched at a time.
STEP = 1 << 20
MAGIC_OFFSET = 257
PAX_RECORD = re.compile(rb"(\d{1,10}) ([^=]{1,1000})=")


def local_bytes(url: str) -> int | None:
    """Length of a local shard, MISSING if it is not there, None for remote ones."""
    if scheme(url):
        return None
    return os.path.getsize(url) if os.path.isfile(url) else MISSING


def expand(shards: str | Sequence[str]) -> list[str]:
    """The shards that a pattern or a list of patterns names.

    Braces and lists keep their order; files found by a folder or a glob are sorted. URLs are without secrets.
    """
    patterns = [take(pattern) for pattern in ([shards] if isinstance(shards, str) else shards)]
    urls: list[str] = []
    for pattern in patterns:
        for url in [pattern] if scheme(pattern) == "pipe" else _expanded(pattern):
            urls += _found(url)
    if not urls:
        raise UserError(
            f"{', '.join(patterns) or 'shards'}: no shards there. Expected {', '.join(SUFFIXES)}."
        )
    if len(set(urls)) < len(urls):
        twice = [url for url, count in Counter(urls).items() if count > 1]
        raise UserError(
            f"{first_few(twice, len(twice))}: named more than once. Each shard is read once per epoch; the "
            f"part of a URL after the ? and the options of a command do not name it."
        )
    return urls


def _expanded(pattern: str) -> Iterator[str]:
    """Yield the names that the braces of a pattern stand for."""
    try:
        yield from braceexpand(pattern)
    except ValueError as error:
        raise UserError(f"{pattern}: {error}. Expected braces as in train-{{000..012}}.tar.") from None


def _found(url: str) -> list[str]:
    kind = scheme(url)
    if kind in STORE_SCHEMES and (url.endswith("/") or _is_glob(url)):
        return _found_in_bucket(url)
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


def _found_in_bucket(url: str) -> list[str]:
    folder = re.split(r"[*?[]", url)[0].rpartition("/")[0]
    pattern = url if _is_glob(url) else url + "*"
    return [
        name for name in list_objects(folder) if fnmatch(name, pattern) and _is_shard(os.path.basename(name))
    ]


@dataclass(frozen=True, slots=True)
class Member:
    """A file in a tar: its bytes are `size` from `offset` on."""

    name: str
    offset: int
    size: int
    hollow: bool = False
    """A link or a sparse file: its content is not there as it is."""

    def key_and_extension(self) -> tuple[str, str] | None:
        """(key, lower-case extension) as WebDataset has them: cut at the first dot; None for others."""
        match = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", self.name)
        if not match or re.match(r"__[^/]*__($|/)", self.name):
            return None
        return match[1], match[2].lower()


def members(
    shard: Shard, on_damage: Callable[[str], None] | None = None, *, hollow: bool = False
) -> Iterator[Member]:
    """The files of a tar, from front to back, and links and sparse files if `hollow`.

    Where the tar is damaged, `on_damage` is told, and reading continues at the next header that is whole;
    without `on_damage` it raises Unreadable.
    """
    name = None
    for info, start in _entries(shard, on_damage):
        if info.type in NAME_TYPES:
            name = info.name or name
            continue
        is_hollow = info.type in HOLLOW_TYPES
        if info.type in (tarfile.REGTYPE, tarfile.AREGTYPE) or (hollow and is_hollow):
            yield Member(name or info.name, start, info.size, hollow=is_hollow)
        if info.type not in EXTENSION_TYPES:
            name = None


def _entries(shard: Shard, on_damage: Callable[[str], None] | None) -> Iterator[tuple[tarfile.TarInfo, int]]:
    """(header, where its content starts) of every entry; those that name the next one have that name."""
    position: int | None = 0
    start, damages = 0, 0
    while position is not None:
        try:
            if (info := _header(shard, position)) is None:
                break
        except Unreadable as error:
            if on_damage is None:
                raise
            damages += 1
            on_damage(f"{error}{'; the rest is given up' if damages > MOST_DAMAGES else ''}")
            # An entry that reaches beyond the end is the damage: search from where it starts.
            beyond = shard.end is not None and position >= shard.end
            again = start if beyond else position + BLOCK
            position = _next_header(shard, again) if damages <= MOST_DAMAGES else None
            continue
        start = position + BLOCK
        yield info, start
        position = start + _following(info)
    if position is not None and on_damage is not None:
        _check_end(shard, position, on_damage)


def _following(info: tarfile.TarInfo) -> int:
    # Links and folders may state a size, but no bytes follow.
    follow = 0 if info.type in (tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE) else info.size
    return -(-follow // BLOCK) * BLOCK


def _header(shard: Shard, position: int) -> tarfile.TarInfo | None:
    """The header at a place, None at the end of the tar; GNU and pax headers have the name they give."""
    content = bytes(shard.read_at(position, BLOCK))
    if not any(content):
        return None
    try:
        info = tarfile.TarInfo.frombuf(content, "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError) as error:
        raise Unreadable(f"no tar header at byte {position}: {error}") from error
    if info.size < 0 or (info.type in EXTENSION_TYPES and info.size > LONGEST_HEADER):
        raise Unreadable(f"no tar header at byte {position}: impossible size {info.size}")
    if shard.end is not None and position + BLOCK + info.size > shard.end and _following(info):
        raise Unreadable(f"{info.name}: {info.size} bytes, but the tar ends at byte {shard.end}")
    if info.type in NAME_TYPES:
        info.name = _long_name(bytes(shard.read_at(position + BLOCK, info.size)), info.type) or ""
    return info


def _next_header(shard: Shard, position: int) -> int | None:
    """Where the next whole header is, at this place or after it; None if there is none."""
    while shard.end is None or position + BLOCK <= shard.end:
        count = STEP if shard.end is None else min(STEP, (shard.end - position) // BLOCK * BLOCK)
        end_was_known = shard.end is not None
        try:
            content = shard.read_at(position, count)
        except Unreadable:
            # A stream knows its end only now. On a disk these bytes are lost.
            position += count if end_was_known else 0
            continue
        for at in range(0, count, BLOCK):
            if content.startswith(b"ustar", at + MAGIC_OFFSET) and _is_header(content[at : at + BLOCK]):
                return position + at
        position += count
    return None


def _is_header(content: bytearray) -> bool:
    try:
        tarfile.TarInfo.frombuf(bytes(content), "utf-8", "surrogateescape")
    except (tarfile.TarError, ValueError):
        return False
    return True


def _check_end(shard: Shard, position: int, on_damage: Callable[[str], None]) -> None:
    """Say so if entries follow the NULs that end a tar: a crash may have left these."""
    if shard.end is not None and (following := _next_header(shard, position)) is not None:
        on_damage(
            f"NULs at byte {position} end the tar, but a header follows at byte {following}: "
            f"what is there is not read. Write the shard again if that was not intended."
        )


def _long_name(payload: bytes, kind: bytes) -> str | None:
    """The name that a GNU or pax header gives the member after it, if it gives one."""
    name = payload.rstrip(b"\0") if kind == tarfile.GNUTYPE_LONGNAME else _pax_path(payload)
    if name is not None and len(name) > LONGEST_NAME:
        raise Unreadable(f"a name of {len(name)} bytes, expected at most {LONGEST_NAME}")
    return None if name is None else name.decode("utf-8", "surrogateescape")


def _pax_path(payload: bytes) -> bytes | None:
    """The record `path` of a pax header; records that are not well-formed end the search."""
    position = 0
    while match := PAX_RECORD.match(payload, position):
        end = position + int(match[1])
        if end <= match.end() or end > len(payload):
            return None
        if match[2] == b"path":
            return payload[match.end() : end - 1]
        position = end
    return None
