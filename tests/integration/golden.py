"""Losses and sums of a few tiny runs, recorded once, so that a refactoring that changes the training is seen.

    python -m tests.integration.golden                  # write golden.json anew: only when a change is wanted
    python -m tests.integration.golden --exact FILE     # write digests of all bits to FILE, or compare

`golden.json` is compared within the tolerance that another CPU needs. On one machine `--exact` is stricter:
call it at one revision and then at another.

Between torch 2.4 and 2.15 the draws of nn.Dropout changed: of the same seed it drops other features. All else
is the same: `rand`, the initial weights, decoded and resized images, batch norm. Only the PORTABLE runs have
the same losses with both; the others are compared where nn.Dropout draws as it did when they were recorded.
"""

import argparse
import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.builders import make_shards
from tests.faults.training import Training, small_config
from tests.forks import TRAINER_MODULES, ForkServer
from tests.integration.runs import losses_of, memory_of, weights_of

RECORDED = Path(__file__).parent / "golden.json"
PROCESSES = (1, 2)
RUNS: dict[str, dict[str, dict[str, Any]]] = {
    "an": {"objective": {"base": "an", "consistency": "none"}, "store": {"kind": "none"}},
    "en_cl": {"objective": {"base": "en", "consistency": "cl", "gamma": {"epochs": 2}}},
    "en_scl": {},
    "role": {"objective": {"base": "role", "consistency": "none"}, "store": {"kind": "none"}},
}
ARRAYS = ("heatmaps", "scores", "last_epoch")
"""Of near ties in the scores another CPU may keep another class: its choice is not recorded."""
PORTABLE = ("en_scl", "role")
"""Runs that are also recorded with a network that every version of torch trains alike."""
RUNS |= {
    f"{name} portable": RUNS[name] | {"model": {"backbone": "tests.integration.tiny:portable_noisy_net"}}
    for name in PORTABLE
}
DROPPED = (0, 1, 3, 5)
"""The features of ten that nn.Dropout(0.3) drops first after seed 0, where the runs were recorded."""
NO_STORE = {"kind": "none", "top": None, "history_samples": 64, "slots": 3}
"""Settings of the store would have no effect, and are refused."""


def draws_as_recorded() -> bool:
    """Whether nn.Dropout drops the same features here as where the runs were recorded."""
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(0)
        dropped = torch.nn.functional.dropout(torch.ones(10), 0.3) == 0
    return tuple(dropped.nonzero().flatten().tolist()) == DROPPED


def config_of(name: str, path: Path, shards: Path) -> Path:
    """The config file of one of the runs."""
    sections = dict(RUNS[name])
    if sections.get("store", {}).get("kind") == "none":
        sections["store"] = NO_STORE
    return small_config(path, shards, **sections)


def figures(folder: Path, shards: Path) -> dict[str, Any]:
    """What is recorded of a run: the loss of every step, and sums over its weights and its store."""
    weights = {name: weight.numpy() for name, weight in weights_of(folder).items()}
    found = {"losses": [loss for _, loss in losses_of(folder)], "weights": _sums(weights)}
    if (folder / "store").exists():
        rows = memory_of(folder, shards)
        found["store"] = _sums({name: rows[name] for name in ARRAYS})
    return found


def digest(folder: Path, shards: Path) -> str:
    """A digest of all bits of a run's losses, weights and store."""
    state = hashlib.sha256(json.dumps(losses_of(folder)).encode())
    arrays = {name: weight.numpy() for name, weight in weights_of(folder).items()}
    if (folder / "store").exists():
        rows = memory_of(folder, shards)
        arrays |= {name: rows[name] for name in (*ARRAYS, "classes") if name in rows}
    for name in sorted(arrays):
        state.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    return state.hexdigest()


def _sums(arrays: dict[str, Any]) -> dict[str, list[float]]:
    """(sum, sum of magnitudes, sum weighted by place) of each array, which sees values that swap places."""
    sums = {}
    for name, array in sorted(arrays.items()):
        values = np.asarray(array, np.float64).ravel()
        places = np.cos(np.arange(len(values)))
        sums[name] = [float(values.sum()), float(np.abs(values).sum()), float((values * places).sum())]
    return sums


def train_all(server: ForkServer, shards: Path, folder: Path) -> dict[str, Path]:
    """The folders of all runs on all numbers of processes, by `name on n`."""
    folders = {}
    for name in RUNS:
        for processes in PROCESSES:
            run = Training(server, config_of(name, folder / f"{name}-{processes}.yaml", shards))
            run.run_to_the_end(processes=processes)
            folders[f"{name} on {processes}"] = run.folder
    return folders


def make_golden_shards(folder: Path) -> Path:
    """Four shards, the last one shorter: 22 images."""
    return make_shards(folder, 22, 6)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--exact", type=Path, metavar="FILE")
    exact = parser.parse_args().exact
    with tempfile.TemporaryDirectory() as place, ForkServer(*TRAINER_MODULES) as server:
        shards = make_golden_shards(Path(place) / "shards")
        folders = train_all(server, shards, Path(place))
        measure = figures if exact is None else digest
        found = {name: measure(folder, shards) for name, folder in folders.items()}
    if exact is None or not exact.exists():
        lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in found.items())
        (exact or RECORDED).write_text(f"{{\n{lines}\n}}\n")
        return 0
    before = json.loads(exact.read_text())
    for name, value in found.items():
        print(f"{name}: {'same' if value == before.get(name) else 'DIFFERS'}")
    return int(found != before)


if __name__ == "__main__":
    sys.exit(main())
