"""One writer at a time: a file that names the run which holds the store."""

import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Self

from store.backends import Backend
from store.errors import AlreadyExists, LeaseHeld

logger = logging.getLogger(__name__)

KEY = "lease.json"
BEAT_SECONDS = 20.0
# A holder on another host is dead when its counter stood still for this long. No clocks are compared.
PATIENCE_SECONDS = 3 * BEAT_SECONDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """Who holds a lease."""

    run: str
    host: str
    pid: int
    started: str
    """When that process started, as the kernel counts it: a pid alone may have been given to another."""
    since: float
    token: str
    beats: int = 0

    def __str__(self) -> str:
        since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        return f"run {self.run!r} (host {self.host}, pid {self.pid}, since {since})"

    def to_bytes(self) -> bytes:
        """The lease file's content."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Self:
        """The holder in a lease file."""
        return cls(**json.loads(data))

    @classmethod
    def this_process(cls, run: str) -> Self:
        """The calling process, as a holder."""
        pid = os.getpid()
        return cls(
            run=run,
            host=socket.gethostname(),
            pid=pid,
            started=process_start(pid) or "",
            since=time.time(),
            token=uuid.uuid4().hex,
        )


def process_start(pid: int) -> str | None:
    """When a process of this host started, in the kernel's ticks; None if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            fields = file.read().rpartition(")")[2].split()
    except FileNotFoundError:
        return None if os.path.exists("/proc/self/stat") else _start_without_proc(pid)
    # A zombie has ended; only its parent has not yet asked how.
    return None if fields[0] in "ZX" else fields[19]


def _start_without_proc(pid: int) -> str | None:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return None
    except PermissionError:
        pass
    return ""


def read_holder(backend: Backend) -> Holder | None:
    """Who holds the lease now, if anyone."""
    data = backend.read(KEY)
    return None if data is None else Holder.from_bytes(data)


def is_dead(backend: Backend, holder: Holder, patience_seconds: float) -> bool:
    """Whether a holder is certainly gone: its process on this host, or its heartbeat on another."""
    if holder.host == socket.gethostname():
        return process_start(holder.pid) != holder.started
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, patience_seconds / 10))
        seen = read_holder(backend)
        if seen is None or seen.token != holder.token:
            return seen is None
        if seen.beats != holder.beats:
            return False
    return True


class Lease:
    """Held from `acquire` to `release`; a thread bumps its counter so that others can see we live."""

    def __init__(self, backend: Backend, holder: Holder, beat_seconds: float) -> None:
        self._backend = backend
        self._holder = holder
        self._beat_seconds = beat_seconds
        self._released = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="store-lease", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(
        cls,
        backend: Backend,
        run: str,
        *,
        patience_seconds: float = PATIENCE_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
    ) -> Self:
        """The lease, taken over from a holder that is certainly dead; or LeaseHeld, naming the holder."""
        holder = Holder.this_process(run)
        while True:
            try:
                backend.create(KEY, holder.to_bytes())
                return cls(backend, holder, beat_seconds)
            except AlreadyExists:
                other = read_holder(backend)
            if other is not None:
                if not is_dead(backend, other, patience_seconds):
                    raise LeaseHeld(
                        f"{backend.url}: in use by {other}. Wait until it ends, or, if it is dead "
                        f"for certain, break its lease with `bigscl unlock`."
                    )
                break_lease(backend, other)

    def _beat(self) -> None:
        while not self._released.wait(self._beat_seconds):
            try:
                if self.is_ours():
                    self._holder = replace(self._holder, beats=self._holder.beats + 1)
                    self._backend.replace(KEY, self._holder.to_bytes())
            except Exception as error:  # a missed beat is not yet a lost lease: the next commit checks
                logger.warning("lease of %s: heartbeat failed: %s", self._backend.url, error)

    def is_ours(self) -> bool:
        """Whether nobody took the lease from us meanwhile."""
        seen = read_holder(self._backend)
        return seen is not None and seen.token == self._holder.token

    def check(self) -> None:
        """Raise LeaseHeld if the lease was broken: what follows would mix two runs' writes."""
        if not self.is_ours():
            raise LeaseHeld(
                f"{self._backend.url}: the lease of {self._holder} was broken; it is now held by "
                f"{read_holder(self._backend) or 'nobody'}. Stop this run; resume it from a checkpoint."
            )

    def release(self) -> None:
        """Give the store back; a lease that was taken from us stays with its taker."""
        self._released.set()
        self._thread.join()
        if self.is_ours():
            self._backend.delete(KEY)


def break_lease(backend: Backend, holder: Holder | None = None) -> Holder | None:
    """Remove the lease (only this holder's, if given) and say whose it was."""
    seen = read_holder(backend)
    if seen is not None and (holder is None or seen.token == holder.token):
        backend.delete(KEY)
    return seen
