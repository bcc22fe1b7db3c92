import errno
import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest

from bigscl.preflight import environment
from bigscl.preflight.environment import NEEDED, probe_place
from bigscl.store import LocalBackend, SingleProcess, StorageOptions
from tests.integration.runs import launcher_words
from tests.test_store.ranks import run_ranks
from tests.test_tools.conftest import bigscl
from tests.test_tools.lookers import look

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Trying bf16 in another process takes seconds, and is tested with the code that does it."""
    monkeypatch.setattr(environment, "_bf16", lambda: True)
    for name in [*os.environ]:
        if name.startswith("ACCELERATE_") or name in ("RANK", "WORLD_SIZE"):
            monkeypatch.delenv(name)


def test_a_good_environment_is_well(tmp_path):
    answer = bigscl("preflight", "--place", tmp_path / "store")
    assert answer.code == 0, answer.out
    assert f"torch {version('torch')}" in answer.out
    assert "world size 1 (not under a launcher)" in answer.out
    assert "the same for all processes" in answer.out
    assert answer.out.strip().endswith("all is well")
    assert list(tmp_path.iterdir()) == []


def test_json_tells_versions_backends_and_space(tmp_path):
    (process,) = bigscl("preflight", "--place", tmp_path, "--json").json()["processes"]
    assert process["versions"]["zarr"] == version("zarr")
    assert process["backends"]["gloo"]
    assert process["free_bytes"] > 0
    assert process["ram_bytes"] > 0


def test_a_place_that_cannot_be_written_to_is_a_problem(tmp_path):
    (tmp_path / "file").write_text("in the way")
    answer = bigscl("preflight", "--place", tmp_path / "file" / "store")
    assert answer.code == 1
    assert "rank 0 cannot write to" in answer.out


def test_a_launcher_that_started_one_process_only_is_a_problem(monkeypatch):
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    answer = bigscl("preflight")
    assert answer.code == 1
    assert "accelerate started one process only" in answer.out


def process(**differing):
    facts = environment._environment(None)
    return {**facts, "launched": True, **differing}


@pytest.mark.parametrize(
    ("differing", "problem"),
    [
        ({"versions": {**dict.fromkeys(NEEDED, "1.0"), "zarr": "2.0"}}, "zarr has several versions"),
        ({"versions": {**dict.fromkeys(NEEDED, "1.0"), "zarr": None}}, "zarr is not installed on far"),
        ({"python": "3.10.0"}, "several versions of Python"),
        ({"backends": {"gloo": False, "nccl": False}}, "far: torch has no gloo"),
        (
            {"backends": {"gloo": True, "nccl": False}, "devices": [{}]},
            "far: has GPUs, but torch has no nccl",
        ),
        ({"shared_memory_bytes": 64 * 2**20}, "far: 67.1 MB free in /dev/shm"),
        ({"address": "127.0.1.1"}, "ranks on far listen on the loopback address only"),
        ({"timeout_minutes": 30.0}, "far: the ranks' group waits for 30 minutes, asked for were 1"),
    ],
)
def test_processes_that_do_not_fit_together_are_a_problem(differing, problem):
    versions = dict.fromkeys(NEEDED, "1.0")
    near = process(host="near", versions=versions, shared_memory_bytes=None)
    far = process(**{"host": "far", "versions": versions, "shared_memory_bytes": None, **differing})
    assert list(environment._problems([near, near])) == []
    (found,) = environment._problems([near, far])
    assert problem in found


@pytest.mark.parametrize("same", [True, False])
def test_processes_that_see_different_places_are_found_out(tmp_path, same):
    assert run_ranks(look, 2, tmp_path, same) == [0, 0]
    problems = json.loads((tmp_path / "problems.json").read_text())
    assert len(problems) == (0 if same else 2)
    if not same:
        assert "rank 0 does not see what ranks [1] wrote" in problems[0]
        assert "rank 1 does not see what ranks [0] wrote" in problems[1]
    assert [file.name for file in tmp_path.iterdir()] == ["problems.json"]


def test_a_cache_that_shows_files_after_they_were_renamed_over_is_found_out(tmp_path, monkeypatch):
    cache = {}
    read = LocalBackend.read
    monkeypatch.setattr(LocalBackend, "read", lambda self, key: cache.setdefault(key, read(self, key)))
    (problem,) = probe_place(str(tmp_path), StorageOptions(), SingleProcess(), patience_seconds=0.1)
    assert f"rank 0 still reads the old content of files in {tmp_path} that ranks [0] renamed" in problem
    assert list(tmp_path.iterdir()) == []


def test_a_file_system_without_hard_links_is_a_problem(tmp_path, monkeypatch):
    def no_links(source, target):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_links)
    answer = bigscl("preflight", "--place", tmp_path)
    assert answer.code == 1
    assert "this file system has no hard links" in answer.out


def test_a_bucket_is_probed_like_a_folder(s3_options):
    assert probe_place("s3://bucket/probed", s3_options, SingleProcess()) == []
    (problem,) = probe_place("s3://no-such-bucket/probed", s3_options, SingleProcess())
    assert "rank 0 cannot write to s3://no-such-bucket/probed" in problem


def test_processes_of_the_real_launcher_report_together(tmp_path, trainer_server):
    job = ["-m", "bigscl.tools.cli", "preflight", "--place", tmp_path / "store", "--json"]
    done = trainer_server.run_module(*launcher_words(2), *job)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.strip().splitlines()[-1])
    assert len(facts["processes"]) == 2
    assert facts["problems"] == []
    assert [one["timeout_minutes"] for one in facts["processes"]] == [environment.TIMEOUT_MINUTES] * 2
    assert list(tmp_path.iterdir()) == []
