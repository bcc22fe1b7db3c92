"""What a command costs, with all processes it starts: wall and CPU time, memory, bytes. Linux only."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import psutil

SAMPLE_SECONDS = 0.2
ORPHAN_SECONDS = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What was used so far, or in a stretch of time."""

    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0
    """User and system time of all processes."""
    rss_tree: int = 0
    """Largest sum of resident bytes over the processes alive at one moment; shared pages count in each."""
    rss_process: int = 0
    """Largest resident bytes of one process."""
    read_bytes: int = 0
    """Bytes that read calls returned, from the page cache too."""
    written_bytes: int = 0

    def since(self, before: "Cost") -> "Cost":
        """What was used after `before`; the memory is that of this moment."""
        return replace(
            self,
            wall_seconds=self.wall_seconds - before.wall_seconds,
            cpu_seconds=self.cpu_seconds - before.cpu_seconds,
            read_bytes=self.read_bytes - before.read_bytes,
            written_bytes=self.written_bytes - before.written_bytes,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A line of the table."""

    stage: str
    cost: Cost
    images: int | None = None
    """Images trained, where that is what the stage does."""
    note: str = ""
    failed: bool = False

    def line(self) -> str:
        """For people who wait."""
        state = "FAILED " if self.failed else ""
        cost = f"{self.cost.wall_seconds:.1f} s, {self.cost.cpu_seconds:.1f} CPU s"
        return f"{state}{self.stage}: {cost} {self.note}".rstrip()

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Row":
        return Row(**{**values, "cost": Cost(**values["cost"])})


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A command that has ended, with all it has used."""

    returncode: int
    output: str
    errors: str
    cost: Cost

    @property
    def last_line(self) -> str:
        """What it said last, which is its error if it failed."""
        lines = (self.errors.strip() or self.output.strip()).splitlines()
        return lines[-1].strip() if lines else ""


class Watched:
    """A running command. `cost` is what it and its children have used up to the last look."""

    def __init__(self, command: list[str], folder: Path, environment: Mapping[str, str], logs: Path) -> None:
        logs.parent.mkdir(parents=True, exist_ok=True)
        self._logs = (logs.with_suffix(".out"), logs.with_suffix(".err"))
        self._started = time.monotonic()
        with self._logs[0].open("w") as out, self._logs[1].open("w") as err:
            self._process = subprocess.Popen(
                command, cwd=folder, env=dict(environment), stdout=out, stderr=err, start_new_session=True
            )
        self._main = psutil.Process(self._process.pid)
        self._alive: dict[psutil.Process, Cost] = {}
        self.cost = Cost()

    def look(self) -> None:
        """Measure all its processes."""
        seen: dict[psutil.Process, Cost] = {}
        for process in [self._main, *_children(self._main)]:
            if (found := _measure(process)) is not None:
                seen[process] = found
        self._alive = seen
        self.cost = self._sum(seen)

    def _sum(self, seen: Mapping[psutil.Process, Cost]) -> Cost:
        # Kernel counters of a process take in those of children that it has waited for, so a child that ended
        # moves from its own line to its parent's, and the sum over the living misses nothing.
        total = replace(
            self.cost,
            wall_seconds=time.monotonic() - self._started,
            rss_tree=sum(cost.rss_tree for cost in seen.values()),
            rss_process=max((cost.rss_process for cost in seen.values()), default=0),
        )
        return replace(
            total,
            cpu_seconds=max(total.cpu_seconds, sum(cost.cpu_seconds for cost in seen.values())),
            read_bytes=max(total.read_bytes, sum(cost.read_bytes for cost in seen.values())),
            written_bytes=max(total.written_bytes, sum(cost.written_bytes for cost in seen.values())),
        )

    def run(self, on_look: Callable[["Watched"], None] = lambda watched: None) -> Ended:
        """Wait for its end, looking at it all the while."""
        peak = Cost()
        while os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None:
            self.look()
            peak = larger(peak, self.cost)
            on_look(self)
            time.sleep(SAMPLE_SECONDS)
        return self._end(peak)

    def kill(self) -> None:
        """kill -9 of the process itself; its children are on their own."""
        self.look()
        self._process.send_signal(signal.SIGKILL)

    def stop(self) -> None:
        """SIGTERM, upon which a trainer saves its run and ends."""
        self._process.send_signal(signal.SIGTERM)

    def _end(self, peak: Cost) -> Ended:
        read, written = _io(self._process.pid)
        _, status, usage = os.wait4(self._process.pid, 0)
        self._process.returncode = os.waitstatus_to_exitcode(status)
        orphans = [process for process in self._alive if process != self._main and process.is_running()]
        costs = [cost for process in orphans if (cost := self._alive.get(process)) is not None]
        cost = replace(
            peak,
            wall_seconds=time.monotonic() - self._started,
            cpu_seconds=usage.ru_utime + usage.ru_stime + sum(one.cpu_seconds for one in costs),
            rss_process=max(peak.rss_process, usage.ru_maxrss * 1024),
            rss_tree=max(peak.rss_tree, usage.ru_maxrss * 1024),
            read_bytes=read + sum(one.read_bytes for one in costs),
            written_bytes=written + sum(one.written_bytes for one in costs),
        )
        self._wait_for(orphans)
        texts = [path.read_text(errors="replace") for path in self._logs]
        return Ended(returncode=self._process.returncode, output=texts[0], errors=texts[1], cost=cost)

    @staticmethod
    def _wait_for(orphans: list[psutil.Process]) -> None:
        """Loader workers notice that their trainer was killed; none may be left when it is started again."""
        _, left = psutil.wait_procs(orphans, timeout=ORPHAN_SECONDS)
        for process in left:
            process.kill()
        if left:
            raise RuntimeError(
                f"{len(left)} processes outlived the one that was killed by {ORPHAN_SECONDS} s"
            )


def larger(a: Cost, b: Cost) -> Cost:
    return replace(b, rss_tree=max(a.rss_tree, b.rss_tree), rss_process=max(a.rss_process, b.rss_process))


def _children(process: psutil.Process) -> list[psutil.Process]:
    try:
        return list(process.children(recursive=True))
    except psutil.NoSuchProcess:
        return []


def _measure(process: psutil.Process) -> Cost | None:
    """What one process has used, with the children it has waited for; None if it has ended."""
    try:
        with process.oneshot():
            times, rss = process.cpu_times(), process.memory_info().rss
        read, written = _io(process.pid)
    except (psutil.Error, OSError):
        return None
    cpu = times.user + times.system + times.children_user + times.children_system
    return Cost(cpu_seconds=cpu, rss_tree=rss, rss_process=rss, read_bytes=read, written_bytes=written)


def _io(pid: int) -> tuple[int, int]:
    """Bytes read and written by a process and the children it has waited for."""
    lines = Path(f"/proc/{pid}/io").read_text().splitlines()
    values = {name: int(value) for name, value in (line.split(": ") for line in lines)}
    return values["rchar"], values["wchar"]


def save_rows(path: Path, rows: list[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row.to_json() for row in rows], indent=1))


def load_rows(path: Path) -> list[Row]:
    return [Row.from_json(values) for values in json.loads(path.read_text())]
