"""Train runs one after the other; write how many bytes the store of each had at most, and its log lines.

The store grows by commits and shrinks by drops, so its peak is seen before each drop, or at the end.
"""

import gc
import json
import logging
import sys
from pathlib import Path

from bigscl.store import HeatmapStore
from bigscl.train import main

peak = 0
drop, close = HeatmapStore.drop_announced, HeatmapStore.close


def watched_drop(self):
    look(self)
    drop(self)


def watched_close(self):
    look(self)
    close(self)


def look(store):
    global peak
    peak = max(peak, sum(store.sizes().values()))


class Lines(logging.Handler):
    def __init__(self):
        super().__init__()
        self.lines = []

    def emit(self, record):
        self.lines.append(record.getMessage())


HeatmapStore.drop_announced = watched_drop
HeatmapStore.close = watched_close
# A run collects garbage between its phases, which takes long among all that the imports made.
gc.freeze()
results = []
for words in json.loads(Path(sys.argv[1]).read_text()):
    peak, handler = 0, Lines()
    logger = logging.getLogger("bigscl.train")
    logger.addHandler(handler)
    code = main(words)
    logger.removeHandler(handler)
    results.append({"code": code, "peak": peak, "lines": handler.lines})
Path(sys.argv[2]).write_text(json.dumps(results))
