"""Runs that earlier revisions have written open, verify, and resume to the end that they would have come to.

Each archive has shards, an index, a config and a run that was stopped in its last epoch, as written by the
revision in its name, one for each revision that changed a format.
"""

import shutil
import tarfile
from pathlib import Path

import numpy as np
import pytest

from bigscl.store.verification import verify
from tests.faults.training import Training
from tests.integration.golden import draws_as_recorded
from tests.integration.runs import losses_of, memory_of, store_of, weights_of
from tests.test_tools.conftest import bigscl

ARCHIVES = sorted((Path(__file__).parent / "fixtures").glob("run-*.tar.xz"))


@pytest.fixture(params=ARCHIVES, ids=lambda path: path.name.split(".")[0])
def config(request, tmp_path):
    """The config of a run as an earlier revision left it; relative paths are made absolute."""
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    path = tmp_path / "run.yaml"
    path.write_text(
        path.read_text()
        .replace("run: run", f"run: {tmp_path / 'run'}")
        .replace("shards/", f"{tmp_path / 'shards'}/")
    )
    return path


def test_run_of_an_earlier_revision_resumes_and_ends_as_if_begun_now(config, trainer_server):
    shards = config.parent / "shards"
    found = verify(store_of(config.with_suffix(""), shards))
    assert [problems for _, problems in found] == [[], [], [], []]
    run = Training(trainer_server, config)
    run.run_to_the_end()
    if not draws_as_recorded():
        return  # the first epochs had other dropout than they would have here
    resumed = {"losses": losses_of(run.folder), "weights": weights_of(run.folder)}
    memory = dict(memory_of(run.folder, shards).arrays())
    shutil.rmtree(run.folder)
    run.run_to_the_end()
    # The archive was written on another CPU perhaps.
    for (step, loss), (same_step, same_loss) in zip(resumed["losses"], losses_of(run.folder), strict=True):
        assert step == same_step
        assert loss == pytest.approx(same_loss, rel=1e-4)
    for name, weight in weights_of(run.folder).items():
        np.testing.assert_allclose(resumed["weights"][name], weight, rtol=1e-2, atol=1e-3, err_msg=name)
    begun_now = dict(memory_of(run.folder, shards).arrays())
    for name in memory.keys() - {"classes"}:
        np.testing.assert_allclose(
            memory[name].astype(float), begun_now[name].astype(float), atol=5e-3, err_msg=name
        )


def test_looks_of_an_earlier_revision_are_those_that_a_run_of_today_counts(config, trainer_server):
    folder, shards = config.with_suffix(""), config.parent / "shards"
    saved = folder / "config.yaml"
    saved.write_text(config.read_text())
    assert store_of(folder, shards).load_shard(0).counts is None
    answer = bigscl("repair", folder, "--looks", "--apply")
    assert answer.code == 0, answer.err
    run = Training(trainer_server, config)
    run.run_to_the_end()
    counts = memory_of(folder, shards).counts
    assert counts.max() == 3
    shutil.rmtree(folder)
    run.run_to_the_end()
    np.testing.assert_array_equal(counts, memory_of(folder, shards).counts)
