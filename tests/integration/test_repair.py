"""Damage in all that a run could resume from, and the way back into training."""

from pathlib import Path

from tests.builders import write_config
from tests.integration.runs import store_of, train
from tests.test_tools.conftest import bigscl


def corrupt_everywhere(folder, shards, shard, array):
    """Flip a bit in one chunk of a shard, in every retained snapshot."""
    for snapshot in store_of(folder, shards).snapshots():
        store = store_of(folder, shards, snapshot.id)
        keys = [key for key in store.arrays.keys(shard, snapshot.slots[shard]) if f"/{array}/" in key]
        path = Path(store.backend.url, keys[0])
        data = bytearray(path.read_bytes())
        data[11] ^= 64
        path.write_bytes(data)


def test_run_whose_checkpoints_are_all_damaged_is_repaired_and_resumed(tmp_path, shards, trainer_server):
    config = write_config(tmp_path / "run.yaml", shards)
    folder = config.with_suffix("")
    train(config, "--schedule.main.epochs", 1)
    corrupt_everywhere(folder, shards, 3, "heatmaps")
    refused = trainer_server.run_module("bigscl.train", config)
    assert refused.returncode == 2
    assert "Traceback" not in refused.stderr
    assert "shard 3" in refused.stderr
    assert "bigscl repair" in refused.stderr
    assert bigscl("repair", folder).code == 1
    answer = bigscl("repair", folder, "--apply")
    assert answer.code == 0, answer.err
    assert "samples 48-63: reset to their initial values" in answer.out
    train(config)
    done = store_of(folder, shards)
    assert done.snapshot.epoch == 2
    assert (done.last_epochs() == 2).sum() == 150
    assert bigscl("verify", folder).code == 0
