"""One writer at a time: a file that names the run which holds the store.

The lease itself never changes while it is held; its holder bumps a counter in a file of its own, which others
watch. Losing the lease cannot hurt the store: each writer has slots and a snapshot number of its own (see
docs/store-format.md). The lease only tells a second run early that its work would be lost.
"""

import contextlib
import json
import logging
import os
import socket
import threading
import time
import uuid
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Self

from bigscl.store.backends.backend import Backend, check_creates_once
from bigscl.store.errors import AlreadyExists, BadFile, LeaseHeld, StoreError
from bigscl.store.format.fields import Number, Whole, read_object, seal, to_dataclass

logger = logging.getLogger(__name__)

KEY = "lease.json"
BEAT_SECONDS = 20.0
# A holder on another host is dead when its counter stood still for this long. No clocks are compared.
LEASE_PATIENCE_SECONDS = 3 * BEAT_SECONDS
JOIN_SECONDS = 5.0
FREE = b'{"free": '
REMEDY = "Remove it with `bigscl unlock --force --apply` if no run uses this store."


@dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    run: str
    host: str
    pid: Whole
    started: str
    """When that process started, as the kernel counts it: a pid alone may have been given to another."""
    since: Number
    token: str
    machine: str
    """Boot and pid namespace of the holder: the same host name elsewhere says nothing about its pid."""

    def __str__(self) -> str:
        with contextlib.suppress(ValueError, OverflowError, OSError):
            since = datetime.fromtimestamp(self.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            return f"run {self.run!r} (host {self.host!s}, pid {self.pid}, since {since})"
        return f"run {self.run!r} (host {self.host}, pid {self.pid})"

    def to_bytes(self) -> bytes:
        return json.dumps(seal(asdict(self))).encode()

    @classmethod
    def from_bytes(cls, data: bytes, place: str = KEY) -> Self:
        return to_dataclass(cls, read_object(data, place, REMEDY), place, REMEDY)

    @classmethod
    def this_process(cls, run: str) -> Self:
        pid = os.getpid()
        return cls(
            run=run,
            host=socket.gethostname(),
            pid=pid,
            started=process_start(pid) or "",
            since=time.time(),
            token=uuid.uuid4().hex,
            machine=this_machine(),
        )

    @property
    def beat_key(self) -> str:
        return f"lease-{self.token}.beat"


def is_beat(name: str) -> bool:
    return name.startswith("lease-") and name.endswith(".beat")


def this_machine() -> str:
    """Return where a pid means the same process: this boot of this kernel, and the pid namespace."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            return f"{file.read().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


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
    data = backend.read(KEY)
    return None if data is None else _holder_in(backend, data)


def _holder_in(backend: Backend, data: bytes) -> Holder | None:
    """The holder in a lease file; None if it was released or broken."""
    return None if data.startswith(FREE) else Holder.from_bytes(data, f"{backend.url}/{KEY}")


def is_dead(backend: Backend, holder: Holder, patience_seconds: float) -> bool:
    """Whether a holder is certainly gone: its process on this machine, or its heartbeat elsewhere."""
    here = holder.host == socket.gethostname() and holder.machine and holder.machine == this_machine()
    if here:
        return process_start(holder.pid) != holder.started
    first = backend.read(holder.beat_key)
    deadline = time.monotonic() + patience_seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, patience_seconds / 10))
        seen = read_holder(backend)
        if seen is None or seen.token != holder.token:
            return seen is None
        if backend.read(seen.beat_key) != first:
            return False
    return True


class Lease:
    """Held from `acquire` to `release`; a thread increments a counter as a sign of life."""

    def __init__(self, backend: Backend, holder: Holder, beat_seconds: float) -> None:
        self._backend = backend
        self._holder = holder
        self._beat_seconds = beat_seconds
        self._released = threading.Event()
        self._lost = False
        self._thread = threading.Thread(target=self._beat, name="store-lease", daemon=True)
        self._thread.start()

    @classmethod
    def acquire(
        cls,
        backend: Backend,
        run: str,
        *,
        patience_seconds: float = LEASE_PATIENCE_SECONDS,
        beat_seconds: float = BEAT_SECONDS,
    ) -> Self:
        """The lease, taken over from a dead holder; LeaseHeld names a live one."""
        check_creates_once(backend)
        ours = Holder.this_process(run)
        while True:
            try:
                backend.create(KEY, ours.to_bytes())
                return cls(backend, ours, beat_seconds)
            except AlreadyExists:
                data = backend.read(KEY)
            if data is None:
                continue
            other = _holder_in(backend, data)
            if other is not None and not is_dead(backend, other, patience_seconds):
                raise LeaseHeld(
                    f"{backend.url}: in use by {other}. Wait until it ends, or, if it is dead "
                    f"for certain, break its lease with `bigscl unlock`."
                )
            # Of several that saw it dead one takes its place; a beat in between makes all of them fail.
            if backend.swap(KEY, data, ours.to_bytes()):
                if other is not None:
                    backend.delete(other.beat_key)
                return cls(backend, ours, beat_seconds)

    def _beat(self) -> None:
        beats = 0
        while not self._released.wait(self._beat_seconds):
            try:
                self._lost = not self.is_ours()
                if self._lost:
                    return
                beats += 1
                self._backend.replace(self._holder.beat_key, str(beats).encode())
            except Exception as error:  # a missed beat is not yet a lost lease: the next commit checks
                logger.warning("lease of %s: heartbeat failed: %s", self._backend.url, error)

    def is_ours(self) -> bool:
        try:
            seen = read_holder(self._backend)
        except BadFile:
            return False
        return seen is not None and seen.token == self._holder.token

    def check(self) -> None:
        """Raise LeaseHeld if the lease was broken: what follows would mix two runs' work."""
        if not self.is_ours():
            raise self._broken()

    def check_seen(self) -> None:
        """Raise LeaseHeld if the heartbeat found the lease broken; costs nothing."""
        if self._lost:
            raise self._broken()

    def _broken(self) -> LeaseHeld:
        with contextlib.suppress(StoreError):
            now = read_holder(self._backend) or "nobody"
            return LeaseHeld(
                f"{self._backend.url}: the lease of {self._holder} was broken; it is now held by {now}. "
                f"Stop this run; resume it from a checkpoint."
            )
        return LeaseHeld(f"{self._backend.url}: the lease of {self._holder} was overwritten. {REMEDY}")

    def release(self) -> None:
        self._released.set()
        self._thread.join(JOIN_SECONDS)
        _free(self._backend, self._holder.to_bytes())
        self._backend.delete(self._holder.beat_key)


def break_lease(backend: Backend, holder: Holder | None = None) -> Holder | None:
    """Release the lease of this holder (of any, if none is given); return whose it was."""
    data = backend.read(KEY)
    if data is None:
        return None
    seen = None
    with contextlib.suppress(BadFile):
        seen = _holder_in(backend, data)
    if holder is None or (seen is not None and seen.token == holder.token):
        _free(backend, data)
    return seen


def _free(backend: Backend, held: bytes) -> None:
    """Mark a lease as free, if it is still as given.

    A mark stays: deleting the file, or trying again after a lost answer, could remove the lease of another.
    """
    backend.swap(KEY, held, FREE + json.dumps(uuid.uuid4().hex).encode() + b"}")
