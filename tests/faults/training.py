"""Small training runs in forked processes, on one to four ranks, to be killed and resumed."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.injector import Operation, Plan, read_log
from tests.forks import PATIENCE_SECONDS, Ended, ForkServer


class Training:
    """A run in a folder of its own, to be trained in pieces."""

    def __init__(self, server: ForkServer, config: Path, places: Sequence[str] = ()) -> None:
        self._server, self._config = server, config
        self.folder = config.with_suffix("")
        self.output = config.with_suffix(".txt")
        self._log = config.with_suffix(".jsonl")
        self._places = (str(self.folder), *places)

    def run(
        self, *arguments: object, processes: int = 1, rank: int = 0, patience: float = 0.0, **plan: object
    ) -> list[Ended]:
        """Train on to the end, or until the plan strikes on one rank; how each rank ended."""
        given = Plan(places=self._places, log=str(self._log), **plan) if plan else None
        pids = self._server.start_ranks(
            "tests.fork_server:run_module",
            "bigscl.train",
            self._config,
            *arguments,
            processes=processes,
            output=self.output,
            plans={} if given is None else {rank: given},
        )
        ended = self._server.wait_all(pids, PATIENCE_SECONDS, patience)
        return [ended[pid] for pid in pids]

    def run_to_the_end(self, *arguments: object, processes: int = 1) -> None:
        codes = [each.code for each in self.run(*arguments, processes=processes)]
        assert codes == [0] * processes, f"then it ended with {codes}: {self.last_words()}"

    def last_words(self) -> str:
        return self.output.read_text().strip().rpartition("\n")[2]

    @property
    def hit(self) -> list[Operation]:
        """The operations that were hit, or counted, so far."""
        return read_log(self._log)


def small_config(path: Path, shards: Path, **sections: dict[str, Any]) -> Path:
    """Three epochs of six steps: a warm-up, compaction, the whole network; a checkpoint every second step."""
    from tests.builders import write_config

    ours: dict[str, dict[str, Any]] = {
        "data": {"batch_size": 4, "workers": 0, "shuffle_buffer": 8},
        "model": {"backbone": "tests.integration.tiny:noisy_net"},
        "checkpoint": {"every_steps": 2},
        "store": {"slots": 3, "top": 4, "history_samples": 2},
    }
    return write_config(
        path, shards, **{name: ours.get(name, {}) | sections.get(name, {}) for name in ours | sections}
    )
