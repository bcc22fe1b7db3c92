"""Which part of a run is going on, by its metrics, and what each part costs."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.benchmarks.scale_measure import Cost, Ended, Row, Watched, larger


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """What the run had used when it was seen at a step."""

    cost: Cost = field(default_factory=Cost)
    step: int = 0


class Phases:
    """Follows one process of a run: start-up, each epoch, and each end of an epoch.

    An epoch goes from its first logged step to its last; what lies between two epochs ends the first.
    """

    def __init__(self, run: Path, batch: int, first_step: int, prefix: str, *, top: int) -> None:
        self._run, self._batch, self._prefix, self._top = run, batch, prefix, top
        self._untouched = _modified(run)
        self.rows: list[Row] = []
        self.step = first_step
        self.stopped = False
        self._stop_epoch: int | None = None
        self._steps_after_save = 0
        self._kill = False
        self._first_step = first_step
        self._epoch: int | None = None
        self._began = Moment(step=first_step)
        self._last = Moment(step=first_step)
        # Largest memory up to the last logged step, and after it.
        self._peak, self._peak_after = Cost(), Cost()

    def stop_in(self, epoch: int, steps_after_save: int, *, kill: bool) -> None:
        """Stop the run in this epoch (the first is 1), so many steps after it was saved there."""
        self._stop_epoch, self._steps_after_save, self._kill = epoch, steps_after_save, kill

    def follow(self, watched: Watched) -> Ended:
        """Let the run end, or end it as `stop_in` wants."""

        def look(watched: Watched) -> None:
            self._peak_after = larger(self._peak_after, watched.cost)
            line = self._last_line()
            if line is not None and line["step"] > self._first_step:
                self._see(line, watched.cost)
                if not self.stopped and self._stop_is_due(line):
                    watched.kill() if self._kill else watched.stop()
                    self.stopped = True

        ended = watched.run(look)
        self._finish(ended.cost)
        return ended

    def _see(self, line: dict[str, Any], cost: Cost) -> None:
        if line["kind"] != "train" or line["step"] == self.step:
            return
        now = Moment(cost=cost, step=line["step"])
        if line["epoch"] != self._epoch:
            self._end_epoch()
            self._add(self._between, self._began, now, self._peak_after)
            self._began, self._epoch, self._peak = now, line["epoch"], Cost()
        self._peak = larger(self._peak, self._peak_after)
        self._last, self._peak_after, self.step = now, Cost(), now.step

    def _end_epoch(self) -> None:
        """Close the epoch at its last logged step."""
        if self._epoch is not None:
            layout = "scores" if self._epoch == 1 else f"top {self._top}"
            images = (self._last.step - self._began.step) * self._batch
            self._add(f"epoch {self._epoch}, {layout}", self._began, self._last, self._peak, images)
            self._began = self._last

    @property
    def _between(self) -> str:
        if self._epoch is None:
            return "start-up"
        compacts = ", compaction" if self._epoch == 1 else ""
        return f"end of epoch {self._epoch}: selection, commit{compacts}, validation, checkpoint"

    def _finish(self, cost: Cost) -> None:
        now = Moment(cost=cost, step=self.step)
        if self.stopped:
            self._last, self._peak = now, larger(self._peak, self._peak_after)
            self._end_epoch()
        else:
            self._end_epoch()
            self._add(self._between, self._began, now, self._peak_after)

    def _add(self, stage: str, began: Moment, ended: Moment, peak: Cost, images: int | None = None) -> None:
        used = replace(ended.cost.since(began.cost), rss_tree=peak.rss_tree, rss_process=peak.rss_process)
        self.rows.append(Row(stage=f"{self._prefix}: {stage}", cost=used, images=images))

    def _stop_is_due(self, line: dict[str, Any]) -> bool:
        if line["epoch"] != self._stop_epoch or line["kind"] != "train":
            return False
        saved = newest_checkpoint(self._run)
        return self._began.step <= saved and line["step"] >= saved + self._steps_after_save

    def _last_line(self) -> dict[str, Any] | None:
        """The last whole line of the metrics, if this process of the run has touched them."""
        if _modified(self._run) == self._untouched:
            return None
        path = self._run / "metrics.jsonl"
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 10_000))
            lines = [line for line in file.read().split(b"\n")[:-1] if line.startswith(b"{")]
        return json.loads(lines[-1]) if lines else None


def _modified(run: Path) -> int:
    path = run / "metrics.jsonl"
    return path.stat().st_mtime_ns if path.exists() else 0


def newest_checkpoint(run: Path) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    found = sorted(path.name for path in run.glob("checkpoints/step-*"))
    return int(found[-1].removeprefix("step-")) if found else 0
