"""Answers of people to the question whether an image shows a class: a file of JSON lines that only grows.

A line is `{"key": ..., "class": ..., "yes": true, "who": ..., "when": ..., "snapshot": ...}`. `yes` is true
or false; null withdraws what the same person said before. Of one person the latest answer counts, of several
people the latest of theirs, by `when`: so the order of lines is free, files may be joined, and a line that
occurs twice counts once. An answer that is given while the clock is behind one about the same pair in the
file is written with the moment after that. A key is that of a sample in its shard, or `shard/key`, as in a
file of labels.
Our lines end in `crc32`, the digest of their values; those of other programs may have none.
"""

import fcntl
import json
import logging
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import IO, Any, TypeVar

from bigscl.common.files import BadFile, name_os_errors, sync
from bigscl.common.text import first_few, printable
from bigscl.common.user_error import UserError
from bigscl.store import SEAL, seal, seal_fault

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
Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Answer:
    """Answer of a person about one class of one image."""

    key: str
    class_name: str
    yes: bool | None
    """None withdraws the person's answer."""
    who: str
    when: str
    """ISO 8601 with a time zone; `now()` returns it."""
    snapshot: str = ""
    """Snapshot that the person was shown: that of the memory; empty if unknown."""

    @property
    def pair(self) -> Pair:
        """The question: image and class."""
        return self.key, self.class_name

    def to_line(self) -> str:
        """Return the answer as a line of JSON, in ASCII."""
        return json.dumps(seal(self.values()))

    def values(self) -> dict[str, str | bool | None]:
        """Return the fields of the line but for its digest."""
        return {name: getattr(self, attribute) for name, attribute in FIELDS.items()}


@dataclass(frozen=True, slots=True)
class Answers:
    """The answers of a file that hold."""

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


class AnswersFile:
    """A file of answers, whose lines are parsed once; any number of processes may read it and add to it."""

    # Invariant: `_said` has the answers in the first `_num_bytes` bytes, which end with a line, and `_tail`,
    # an answer after them whose end of line is not there yet.

    def __init__(self, path: Path) -> None:
        self.path = path
        self._forget()

    def _forget(self) -> None:
        self._state: tuple[int, ...] | None = None
        self._num_bytes = self._num_lines = self._crc = 0
        self._said: dict[Pair, list[Answer]] = {}
        self._tail: Answer | None = None
        self._torn: list[int] = []
        self._warned: list[int] = []
        self._standing: dict[Pair, Answer] = {}
        self._others: dict[Pair, list[Answer]] = {}
        self._answers = Answers(standing={})

    def read(self) -> Answers:
        """Return what the file says, nothing if it does not exist; BadFile names a line that is no answer."""
        with name_os_errors(self.path):
            try:
                file = self.path.open("rb", buffering=0)
            except FileNotFoundError:
                self._forget()
                return self._answers
            with file:
                return self._follow(file)

    def append(self, answers: Iterable[Answer], *, dated: bool = False) -> int:
        """Add answers that the file does not have yet, synced when this returns; return how many those are.

        They are given now, and count more than those before; `dated` ones were given at their `when`. A line
        that is no answer is BadFile before anything is added. Lines that killed writers left incomplete stay
        apart.
        """
        given = [_checked(answer) for answer in answers]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        is_new = not self.path.exists()
        with name_os_errors(self.path), self.path.open("ab+", buffering=0) as file:
            # The kernel gives the lock back when a writer is killed. It guards the look before the write.
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            self._follow(file)
            missing = self._missing(given, dated)
            data = b"".join(answer.to_line().encode() + b"\n" for answer in missing)
            is_torn = self._num_bytes < os.fstat(file.fileno()).st_size
            _write_all(file.fileno(), b"\n" + data if is_torn and data else data)
            os.fsync(file.fileno())
        if is_new:
            sync(self.path.parent)
        return len(missing)

    def _missing(self, given: Iterable[Answer], dated: bool) -> list[Answer]:
        """Return those answers that the file does not have, with moments after those they count more than."""
        missing: list[Answer] = []
        added: dict[Pair, list[Answer]] = {}
        for answer in given:
            before = [*self._said.get(answer.pair, ()), *added.get(answer.pair, ())]
            if answer not in before:
                missing.append(answer if dated else _after(answer, before, self.path))
                added.setdefault(answer.pair, []).append(missing[-1])
        return missing

    def _follow(self, file: IO[bytes]) -> Answers:
        """Take up what was added to the file, or all of it if it is another one."""
        status = os.fstat(file.fileno())
        state = status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
        if state != self._state:
            self.take(file.read())
            self._state = state
        return self._answers

    def take(self, data: bytes) -> Answers:
        """Return what the file says if these are its bytes; those it had before are not parsed again."""
        if zlib.crc32(memoryview(data)[: self._num_bytes]) != self._crc or len(data) < self._num_bytes:
            self._forget()
        try:
            self._decide(self._parse(data))
        except BaseException:
            self._forget()
            raise
        return self._answers

    def _parse(self, data: bytes) -> Iterable[Pair]:
        """Parse the new lines; return the pairs that they are about."""
        changed: dict[Pair, None] = {}  # in their order
        if self._tail is not None:
            self._said[self._tail.pair].remove(self._tail)
            changed[self._tail.pair] = None
        *lines, tail = data[self._num_bytes :].split(b"\n")
        for line in lines:
            self._num_lines += 1
            self._add(line, self._num_lines, changed, self._torn)
        end = len(data) - len(tail)
        self._crc = zlib.crc32(memoryview(data)[self._num_bytes : end], self._crc)
        self._num_bytes = end
        torn = self._torn.copy()
        self._tail = self._add(tail, self._num_lines + 1, changed, torn)
        if torn and torn != self._warned:
            shown = first_few(map(str, torn), len(torn), most=3)
            logger.warning("%s: skipped incomplete lines of killed writers: %s", self.path, shown)
        self._warned = torn
        return changed

    def _add(self, line: bytes, number: int, changed: dict[Pair, None], torn: list[int]) -> Answer | None:
        if not line.strip():
            return None
        answer = _parsed(line, f"{self.path}: line {number}")
        if answer is None:
            torn.append(number)
        else:
            self._said.setdefault(answer.pair, []).append(answer)
            changed[answer.pair] = None
        return answer

    def _decide(self, changed: Iterable[Pair]) -> None:
        """Decide which of the answers about these pairs count."""
        for pair in changed:
            standing, others = _decided(self._said[pair])
            _keep(self._standing, pair, standing)
            _keep(self._others, pair, others or None)
            _keep(self._said, pair, self._said[pair] or None)
        # Copies: a file that grows does not change what was returned before.
        self._answers = Answers(
            standing=self._standing.copy(),
            conflicts=[
                (answer, self._standing[pair]) for pair, own in self._others.items() for answer in own
            ],
            asked=frozenset(self._said),
            torn=tuple(self._warned),
        )


def _keep(values: dict[Pair, Value], pair: Pair, value: Value | None) -> None:
    if value is None:
        values.pop(pair, None)
    else:
        values[pair] = value


def _write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes, in one call unless the system takes only some of them."""
    while data:
        data = data[os.write(descriptor, data) :]


def read_answers(path: Path) -> Answers:
    """Return what the file says, nothing if it does not exist; BadFile names a line that is no answer."""
    return AnswersFile(path).read()


def standing_answers(answers: Iterable[Answer]) -> Answers:
    """Return which of these answers count."""
    found = AnswersFile(Path())
    for answer in answers:
        found._said.setdefault(answer.pair, []).append(answer)
    found._decide(list(found._said))
    return found._answers


def _decided(answers: Sequence[Answer]) -> tuple[Answer | None, list[Answer]]:
    """Return the answer about a pair that counts, and those of other people that differ from it."""
    if len(answers) == 1:
        return (answers[0] if answers[0].yes is not None else None), []
    latest: dict[str, Answer] = {}
    for answer in sorted(answers, key=_order):
        latest.pop(answer.who, None)  # the place of a later answer is later
        latest[answer.who] = answer
    said = [answer for answer in latest.values() if answer.yes is not None]
    return (said[-1], [answer for answer in said if answer.yes != said[-1].yes]) if said else (None, [])


def _order(answer: Answer) -> tuple[datetime, str]:
    return moment(answer.when), json.dumps(answer.values())


def _after(answer: Answer, before: Iterable[Answer], path: Path) -> Answer:
    """Return the answer with a moment after those before it."""
    last = max((moment(answer.when) for answer in before), default=None)
    if last is None or moment(answer.when) > last:
        return answer
    try:
        after = last.astimezone(UTC) + timedelta(microseconds=1)
    except OverflowError:
        raise BadFile(
            f"{path}: an answer about key {printable(answer.key[:60])!r}, class "
            f"{printable(answer.class_name[:60])!r} is of {last}, and none can be later. {LAST}"
        ) from None
    return replace(answer, when=after.isoformat(timespec="microseconds"))


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
    wrong = sum(letter != wanted != "_" for letter, wanted in zip(text[-len(END) :], END, strict=False))
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
    for name, content in value.items():
        if name == "yes":
            if content is not None and not isinstance(content, bool):
                return f"yes is {printable(str(content)[:60])!r}, not true, false or null"
        elif not isinstance(content, str):
            return f"{name} is {printable(str(content)[:60])!r}, not a text"
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
