"""Answers of people to the question whether an image shows a class: a file of JSON lines that only grows.

A line is `{"key": ..., "class": ..., "yes": true, "who": ..., "when": ..., "snapshot": ...}`. `yes` is true
or false; null withdraws what the same person said before. Of one person the latest answer counts, of several
people the latest of theirs, by `when`: so the order of lines is free, files may be joined, and a line that
occurs twice counts once. A key is that of a sample in its shard, or `shard/key`, as in a file of labels.
Our lines end in `crc32`, the digest of their values; those of other programs may have none.
"""

import fcntl
import json
import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bigscl.files import BadFile, naming, sync
from bigscl.store import SEAL, seal, seal_fault
from bigscl.text import first_few, printable
from bigscl.user_error import UserError

logger = logging.getLogger(__name__)

FILE = "answers.jsonl"
"""The default name, in the folder of a run."""
FIELDS = {
    "key": "key",
    "class": "class_name",
    "yes": "yes",
    "who": "who",
    "when": "when",
    "snapshot": "snapshot",
}
"""The fields of a line, and their names in an Answer."""
Pair = tuple[str, str]
"""Key and class name."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What a person says of one class of one image."""

    key: str
    class_name: str
    yes: bool | None
    """None withdraws the person's answer."""
    who: str
    when: str
    """ISO 8601 with a time zone; `now()` returns it."""
    snapshot: str = ""
    """What the person was shown: the snapshot of the memory; empty if unknown."""

    @property
    def pair(self) -> Pair:
        """What was asked."""
        return self.key, self.class_name

    def to_line(self) -> str:
        """Return the answer as a line of JSON, in ASCII."""
        return json.dumps(seal(self.values()))

    def values(self) -> dict[str, str | bool | None]:
        """Return the fields of the line but for its digest."""
        return {name: getattr(self, attribute) for name, attribute in FIELDS.items()}


@dataclass(frozen=True, slots=True)
class Answers:
    """What a file of answers says."""

    standing: Mapping[Pair, Answer]
    """The answer that counts for each pair; none for those that everybody has withdrawn."""
    conflicts: Sequence[tuple[Answer, Answer]] = ()
    """Pairs of which people say different things: (one that does not count, the later one that does)."""
    asked: frozenset[Pair] = frozenset()
    """All pairs of which there is a line, withdrawn ones too."""
    torn: Sequence[int] = field(default=())
    """Numbers of lines that a killed writer left incomplete; nobody was told that these are saved."""


def now() -> str:
    """Return this moment as answers write it."""
    return datetime.now(UTC).isoformat(timespec="microseconds")


def append_answers(path: Path, answers: Iterable[Answer]) -> int:
    """Add the answers that the file does not have yet, synced when this returns; return how many those are.

    Any number of processes may do so at once. Lines that killed writers left incomplete stay apart.
    """
    lines = [line.encode() for line in dict.fromkeys(_checked(answer).to_line() for answer in answers)]
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.exists()
    with naming(path), path.open("ab+", buffering=0) as file:
        # The kernel gives the lock back when a writer is killed. It guards the look before the write.
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        before = file.read()
        there = set(before.split(b"\n"))
        missing = [line for line in lines if line not in there]
        torn = before and not before.endswith(b"\n")
        data = b"".join(line + b"\n" for line in missing)
        _write_all(file.fileno(), b"\n" + data if torn and data else data)
        os.fsync(file.fileno())
    if is_new:
        sync(path.parent)
    return len(missing)


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes, in one call unless the system takes only some of them."""
    while data:
        data = data[os.write(descriptor, data) :]


def read_answers(path: Path) -> Answers:
    """Return what the file says, nothing if it does not exist; BadFile names a line that is no answer."""
    return parse_answers(path.read_bytes() if path.exists() else b"", path)


def parse_answers(data: bytes, path: Path) -> Answers:
    """Return what the bytes of a file say; `path` is its name in messages."""
    lines = data.split(b"\n")
    found: list[Answer] = []
    torn: list[int] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        answer = _parsed(line, f"{path}: line {number}")
        if answer is None:
            torn.append(number)
        else:
            found.append(answer)
    if torn:
        shown = first_few(map(str, torn), len(torn), most=3)
        logger.warning("%s: skipped incomplete lines of killed writers: %s", path, shown)
    return standing_answers(found, torn)


def standing_answers(answers: Iterable[Answer], torn: Sequence[int] = ()) -> Answers:
    """Return which of these answers count."""
    latest: dict[tuple[Pair, str], Answer] = {}
    for answer in sorted(answers, key=lambda one: (moment(one.when), json.dumps(one.values()))):
        latest.pop((answer.pair, answer.who), None)  # the place of a later answer is later
        latest[answer.pair, answer.who] = answer
    standing: dict[Pair, Answer] = {}
    for answer in latest.values():
        if answer.yes is not None:
            standing[answer.pair] = answer
    conflicts = [
        (answer, standing[answer.pair])
        for answer in latest.values()
        if answer.yes is not None and answer.yes != standing[answer.pair].yes
    ]
    asked = frozenset(pair for pair, _ in latest)
    return Answers(standing=standing, conflicts=conflicts, asked=asked, torn=tuple(torn))


# Lines

LAST = f"Correct the line (without {SEAL}), or remove it."
END = f', "{SEAL}": "________"}}'
"""How our lines end; the digest is in place of the underscores."""


def _parsed(line: bytes, where: str) -> Answer | None:
    """Return the answer in a line; None for the beginning of one."""
    try:
        # A power cut may leave zeros where bytes were not written yet.
        text = line.rstrip(b"\0").decode()
        if not text:
            return None
        value = json.loads(text)
    except json.JSONDecodeError as error:
        if _is_beginning(text, error):
            return None
        raise BadFile(
            f"{where}: {error.msg} in {printable(text[:80])!r}, expected an answer. {LAST}"
        ) from None
    except (UnicodeDecodeError, RecursionError) as error:
        raise BadFile(f"{where}: {type(error).__name__}, expected an answer in UTF-8. {LAST}") from None
    fault = _fault(value)
    if fault:
        raise BadFile(f"{where}: {fault}. Expected {', '.join(FIELDS)}. {LAST}")
    return Answer(**{attribute: value.get(name, "") for name, attribute in FIELDS.items()})


def _is_beginning(text: str, error: json.JSONDecodeError) -> bool:
    """Whether the text is the beginning of an answer, cut anywhere."""
    start = '{"key": '
    wrong = sum(found != wanted != "_" for found, wanted in zip(text[-len(END) :], END, strict=False))
    if error.msg == "Extra data" or (len(text) > len(END) and wrong <= 1):
        return False  # whole, and damaged: its beginnings end elsewhere
    if not (text.startswith(start) or start.startswith(text)):
        return False
    rest = text[error.pos :]
    if error.msg.startswith("Unterminated string"):
        return True
    if error.msg.startswith("Invalid \\"):  # an escape such as \u00fc
        return len(rest) < 6
    return not rest.strip() or any(word.startswith(rest) for word in ("true", "false", "null"))


def _fault(value: Any) -> str | None:
    """Return what keeps a value from being an answer; None if nothing does."""
    if not isinstance(value, dict):
        return f"found {printable(str(value)[:60])}"
    if missing := [name for name in FIELDS if name not in value and name != "snapshot"]:
        return f"no {missing[0]!r}"
    if unknown := [name for name in value if name not in (*FIELDS, SEAL)]:
        return f"an unknown {printable(unknown[0][:60])!r}"
    if SEAL in value and (fault := seal_fault(value)):
        return fault
    for name, one in value.items():
        if name == "yes":
            if one is not None and not isinstance(one, bool):
                return f"yes is {printable(str(one)[:60])!r}, not true, false or null"
        elif not isinstance(one, str):
            return f"{name} is {printable(str(one)[:60])!r}, not a text"
    try:
        moment(value["when"])
    except UserError as error:
        return str(error)
    return None


def moment(when: str) -> datetime:
    """Return the moment of an answer; UserError for a text that is none."""
    try:
        moment = datetime.fromisoformat(when)
    except ValueError:
        moment = datetime.min
    if moment.tzinfo is None:
        raise UserError(
            f"when is {printable(when[:60])!r}, not a date and time with a zone, as 2025-01-31T12:00:00+00:00"
        )
    return moment


def _checked(answer: Answer) -> Answer:
    """Return the answer if it can be read again."""
    if fault := _fault(answer.values()):
        raise UserError(f"answer of key {printable(answer.key[:60])!r}: {fault}")
    return answer
