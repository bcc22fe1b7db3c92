"""The life of a small store in a process of its own, to be interrupted and taken over."""

import os
import signal

from tests.faults.injector import Plan, read_log
from tests.faults.store_life import Ledger, check_committed, check_end


class Life:
    """A store in a folder of its own, to be lived in pieces."""

    def __init__(self, server, folder, url=None, endpoint="", codec="none"):
        self.server, self.folder, self.endpoint, self.codec = server, folder, endpoint, codec
        self.url, self.ledger_path = url or folder / "store", folder / "ledger.json"
        self.output, self.log = folder / "output.txt", folder / "operations.jsonl"
        folder.mkdir()

    @property
    def ledger(self):
        return Ledger(self.ledger_path)

    def run(self, **plan):
        """Live on, until the end or the plan's operation; how it ended."""
        return self.server.wait(self.start(**plan))

    def start(self, function="live", **plan):
        """The process id of a life that goes on from the ledger."""
        given = Plan(places=(str(self.url),), log=str(self.log), **plan) if plan else None
        words = (self.url, self.ledger_path, self.endpoint, self.codec)
        return self.server.start(
            f"tests.faults.store_life:{function}", *words, output=self.output, plan=given
        )

    def thaw(self, pid):
        """How a frozen process ends, or that it froze again."""
        os.kill(pid, signal.SIGCONT)
        return self.server.wait(pid)

    def check_committed(self):
        check_committed(self.url, self.ledger, self.endpoint)

    def last_words(self):
        return self.output.read_text().strip().rpartition("\n")[2]

    def run_to_the_end(self):
        ended = self.run()
        assert ended.code == 0, f"then it could not go on: {self.last_words()}"
        check_end(self.url, self.ledger, self.endpoint)

    @property
    def hit(self):
        """The operations that were hit so far."""
        return read_log(self.log)
