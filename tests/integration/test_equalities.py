"""What must not matter does not: where the memory is kept, and how many processes read the images."""

import json
from pathlib import Path

import numpy as np
from safetensors.torch import load_file

from bigscl.data.build_index import scan
from bigscl.store import Rows
from bigscl.training.checkpoint_folder import Checkpoints
from tests.builders import encoded, jpeg, picture, write_config, write_shards, write_tar
from tests.decoders import needs_nvimgcodec
from tests.integration.runs import (
    assert_same_rows,
    assert_same_runs,
    assert_same_weights,
    losses_of,
    memory_of,
    train,
    weights_of,
)


def test_memory_store_equals_disk_store_bit_for_bit(tmp_path, trainer_server, plain, shards):
    config = write_config(tmp_path / "run.yaml", shards, store={"kind": "ram"})
    kept = tmp_path / "rows.npz"
    done = trainer_server.run_module("tests.integration.keep_memory", kept, config)
    assert done.returncode == 0, done.stderr
    assert not (tmp_path / "run" / "store").exists()
    assert_same_weights(weights_of(tmp_path / "run"), weights_of(plain))
    assert losses_of(tmp_path / "run") == losses_of(plain)
    with np.load(kept) as arrays:
        assert_same_rows(Rows(**arrays), memory_of(plain, shards))


def test_memory_store_of_two_processes_equals_disk_store_and_is_gone_after_the_run(tmp_path, noisy, shards):
    model = {"backbone": "tests.integration.tiny:noisy_net"}
    config = write_config(tmp_path / "run.yaml", shards, model=model, store={"kind": "ram"})
    train(config, processes=2)
    assert_same_weights(weights_of(tmp_path / "run"), weights_of(noisy[2]))
    assert losses_of(tmp_path / "run") == losses_of(noisy[2])
    name = json.loads((tmp_path / "run" / "run.json").read_text())["id"]
    assert not list(Path("/dev/shm").glob(f"*{name}*"))


def test_memory_of_two_killed_processes_is_freed_when_their_run_is_started_again(
    tmp_path, trainer_server, shards
):
    own = {"store": {"kind": "ram"}, "checkpoint": {"every_steps": 1}}
    config = write_config(tmp_path / "run.yaml", shards, **own)
    moment = "bigscl.train:Trainer.train_step before 4"
    trainer_server.run("tests.integration.moments:train", moment, "", config, processes=2)
    name = json.loads((tmp_path / "run" / "run.json").read_text())["id"]
    assert list(Path("/dev/shm").glob(f"*{name}*"))
    done = trainer_server.run_module("bigscl.train", config)
    assert done.returncode == 2
    assert "its store was in memory" in done.stderr
    assert not list(Path("/dev/shm").glob(f"*{name}*"))


def test_no_worker_equals_one_worker_bit_for_bit(tmp_path, plain, shards):
    train(write_config(tmp_path / "run.yaml", shards, data={"workers": 0}))
    assert_same_runs(tmp_path / "run", plain, shards)


@needs_nvimgcodec
def test_decoding_only_what_is_seen_changes_no_bit(tmp_path, trainer_server):
    """With another image format and a broken file among the JPEGs, and with validation."""
    photos = tmp_path / "photos"
    photos.mkdir()
    broken = [
        ("z.jpg", jpeg(1)[:-100]),
        ("z.cls", b"1"),
        ("y.png", encoded(picture(2), "PNG")),
        ("y.cls", b"2"),
    ]
    tars = [*write_shards(photos, [16, 16, 9]), str(write_tar(photos / "train-000003.tar", broken))]
    scan(tars)[0].save(photos / "bigscl-index-train.npz")
    runs = {}
    for decoder in ("torchvision", "nvimgcodec"):
        data = {"decoder": decoder, "val": str(photos / "train-*.tar"), "max_bad_share": 0.1}
        config = write_config(tmp_path / f"{decoder}.yaml", photos, data=data)
        done = trainer_server.run_module("bigscl.train", config)
        assert done.returncode == 0, done.stderr
        assert "skipped" in done.stderr
        runs[decoder] = config.with_suffix("")
    assert_same_runs(runs["nvimgcodec"], runs["torchvision"], photos)
    scores = [(run / "best" / "metrics.json").read_text() for run in runs.values()]
    assert scores[0] == scores[1]


def test_saving_by_the_clock_of_one_rank_changes_no_bit(tmp_path, noisy, shards):
    config = write_config(
        tmp_path / "run.yaml",
        shards,
        model={"backbone": "tests.integration.tiny:noisy_net"},
        checkpoint={"every_minutes": 1e-5},
    )
    done = train(config, processes=2)
    steps = {int(line.rpartition("-")[2]) for line in done.stderr.splitlines() if " I saved " in line}
    assert steps > {10, 20, 30}, "saved at the ends of epochs only"
    assert_same_runs(tmp_path / "run", noisy[2], shards)


def test_ranks_validate_the_averaged_network_of_rank_0_which_is_saved(tmp_path, trainer_server, shards):
    """Each rank averages batch statistics of its own."""
    model = {"backbone": "tests.integration.tiny:noisy_net"}
    config = write_config(tmp_path / "run.yaml", shards, model=model)
    words = ("tests.integration.keep_statistics", tmp_path, config, "--weight_ema", 0.9)
    done = trainer_server.run_module(*words, processes=2)
    assert done.returncode == 0, done.stderr
    zero, one = (load_file(tmp_path / f"{rank}.safetensors") for rank in range(2))
    assert zero
    assert_same_weights(zero, one)
    latest = Checkpoints(tmp_path / "run" / "checkpoints", 1).latest()
    saved = latest.state("average.pt")
    assert_same_weights(zero, {name: saved[f"module.{name}"] for name in zero})
