"""What is foretold of a run's disk, next to what real runs take."""

import json

import pytest

from bigscl.common.text import size
from tests.builders import write_config
from tests.forks import trainer_server
from tests.test_tools.conftest import bigscl

WARMUP = {"epochs": 3, "learning_rate": 1e-2, "decay": "constant"}
SCHEDULE = {"warmup": WARMUP, "main": {"epochs": 4, "learning_rate": 2e-3}}
RUNS = {
    # Heatmaps of the top classes take more than the scores before them: the change of layout is the peak.
    "scores first": {"store": {"top": 4, "slots": 3, "warmup_heatmaps": "scores"}, "schedule": SCHEDULE},
    "dense first": {"store": {"top": 1, "slots": 3, "history_samples": 0}, "schedule": SCHEDULE},
    "one checkpoint": {"store": {"top": 8, "slots": 2, "history_samples": 4}, "schedule": SCHEDULE},
    "more slots than needed": {"store": {"top": 4, "slots": 5}, "checkpoint": {"keep": 2}},
    "saved now and then": {"store": {"top": 6, "slots": 3}, "checkpoint": {"every_epochs": 2}},
    "no change": {"store": {"top": None, "slots": 3}, "schedule": SCHEDULE},
    "changed at the end": {"store": {"top": 4, "slots": 3, "compact_after": 3}},
    "within epochs": {"store": {"top": 4, "slots": 3}, "checkpoint": {"every_steps": 2}},
    "by time": {"store": {"top": 4, "slots": 3}, "checkpoint": {"every_minutes": 1e-5}},
}


QUICK = "scores first"


def train_watched(folder, shards, sections):
    """A run's config file, and how it went."""
    config = write_config(folder / "run.yaml", shards, data={"workers": 0, "batch_size": 32}, **sections)
    given, found = folder / "calls.json", folder / "results.json"
    given.write_text(json.dumps([[str(config)]]))
    done = trainer_server().run_module("tests.integration.watch_disk", given, found)
    assert done.returncode == 0, done.stderr
    (seen,) = json.loads(found.read_text())
    assert seen["code"] == 0
    return config, seen


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == QUICK else [pytest.mark.slow]) for name in RUNS]
)
def test_foretold_disk_is_an_upper_bound_and_what_the_run_says_of_itself(tmp_path, shards, name):
    config, seen = train_watched(tmp_path, shards, RUNS[name])
    facts, text = bigscl("plan", config, "--json").json(), "\n".join(seen["lines"])
    assert seen["peak"] <= facts["disk_bytes"]
    # Checkpoints within an epoch share the shards that it has not come to: how many is not foretold.
    if name not in ("within epochs", "by time"):
        assert facts["disk_bytes"] <= 1.1 * seen["peak"]
    assert f"store: at most {size(facts['disk_bytes'])} on disk" in text
    for phase in facts["phases"]:
        epochs = f"epochs {phase['first_epoch'] + 1} - {phase['last_epoch'] + 1}: "
        (line,) = [line for line in seen["lines"] if line.startswith(epochs)]
        assert f"{size(phase['disk_bytes'])} in {phase['versions']} versions" in line
        assert f"{size(phase['resident_bytes'])} RAM per process" in line
