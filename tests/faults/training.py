"""Small training runs in forked processes, on one to four ranks, to be killed and resumed."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.children import Ended, ForkServer
from tests.faults.injector import Operation, Plan, read_log

SERVER_MODULES = ("bigscl.train", "tests.integration.tiny", "tests.faults.training")
PATIENCE_SECONDS = 150.0


def train(*arguments: str) -> int:
    """What a rank does; runs in a child of the server."""
    from bigscl.train import main

    sys.argv = ["bigscl.train", *arguments]
    return main(list(arguments))


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
        pids = [
            self._server.start(
                "tests.faults.training:train",
                self._config,
                *arguments,
                output=self.output,
                plan=given if number == rank else None,
                environment=environment,
            )
            for number, environment in enumerate(environments(processes))
        ]
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
    from tests.integration.runs import write_config

    ours: dict[str, dict[str, Any]] = {
        "data": {"batch_size": 4, "workers": 0, "shuffle_buffer": 8},
        "model": {"backbone": "tests.integration.tiny:noisy_net"},
        "checkpoint": {"every_steps": 2},
        "store": {"slots": 3, "top": 4, "tracked": 2},
    }
    return write_config(
        path, shards, **{name: ours.get(name, {}) | sections.get(name, {}) for name in ours | sections}
    )


def environments(processes: int) -> list[dict[str, str]]:
    """What a launcher on one machine tells each rank."""
    if processes == 1:
        return [{}]
    from tests.integration.runs import free_port

    shared = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
        "ACCELERATE_MIXED_PRECISION": "no",
        "ACCELERATE_DYNAMO_BACKEND": "no",
    }
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]
