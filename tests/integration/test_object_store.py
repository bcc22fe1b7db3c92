"""Whole runs whose memory is in an object store: behind a bad connection, and where there is none."""

import socket
import subprocess

import pytest

from bigscl.store import HeatmapStore, StorageOptions
from tests.builders import index_of, make_shards, write_config
from tests.faulty_proxy import Chances, faulty_proxy
from tests.forks import CREDENTIALS
from tests.integration import runs
from tests.integration.runs import (
    assert_same_rows,
    assert_same_weights,
    call_all,
    command,
    losses_of,
    memory_of,
    store_of,
    weights_of,
)

pytestmark = pytest.mark.timeout(600)


@pytest.mark.slow
@pytest.mark.parametrize(("chance", "processes"), [(0.05, 2), (0.2, 1)])
def test_a_run_behind_a_bad_connection_ends_as_one_on_disk(s3_endpoint, shards, tmp_path, chance, processes):
    on_disk = write_config(tmp_path / "disk.yaml", shards)
    runs.train(on_disk, processes=processes)
    chances = Chances(drop=chance, error=chance, lose=chance, cut=chance, seed=2)
    url = f"s3://bucket/run-{processes}-{chance}"
    with faulty_proxy(s3_endpoint, chances) as proxy:
        place = {"url": url, "endpoint": proxy.endpoint, "region": "us-east-1"}
        on_s3 = write_config(tmp_path / "s3.yaml", shards, store=place)
        done = subprocess.run(
            command([on_s3], processes),
            cwd=runs.ROOT,
            env={**runs.ENVIRONMENT, **CREDENTIALS},
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    assert min(proxy.faults[fault] for fault in ("drop", "error", "lose", "cut")) > 3
    one, other = on_disk.with_suffix(""), on_s3.with_suffix("")
    assert losses_of(other) == losses_of(one)
    assert_same_weights(weights_of(other), weights_of(one))
    index = index_of(shards)
    options = StorageOptions(endpoint=s3_endpoint, region="us-east-1")
    store = HeatmapStore.open(url, annotations=index.annotations(), options=options)
    assert store.snapshot.attributes == store_of(one, shards).snapshot.attributes
    assert_same_rows(store.read(index.ids()), memory_of(one, shards))


def test_an_object_store_that_cannot_be_used_ends_the_run_in_one_line(s3_endpoint, tmp_path):
    config = write_config(tmp_path / "run.yaml", make_shards(tmp_path / "shards", 24, 12))
    with faulty_proxy(s3_endpoint, lambda *request: "refuse") as proxy, socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        nobody = f"http://127.0.0.1:{silent.getsockname()[1]}"
        places = {
            "Connection refused": ("s3://bucket/a", nobody),
            "Create the bucket, or correct its name": ("s3://no-such-bucket/a", s3_endpoint),
            "Check AWS_ACCESS_KEY_ID": ("s3://bucket/a", proxy.endpoint),
            "expected s3://bucket/prefix": ("s3://bucket/a", "nonsense"),
        }
        calls = {
            reason: [
                config,
                "--run",
                tmp_path / str(number),
                "--store.url",
                url,
                "--store.endpoint",
                endpoint,
            ]
            for number, (reason, (url, endpoint)) in enumerate(places.items())
        }
        ended = call_all(calls)
    for reason, end in ended.items():
        assert end["code"] == 2, end
        assert end["errors"].count("bigscl.train: ") == 1
        last = end["errors"].splitlines()[-1]
        assert last.startswith("bigscl.train: s3://"), end["errors"]
        assert reason in last
