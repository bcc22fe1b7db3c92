"""Whole runs whose tars are in an object store, with loader workers: the memory on disk or there too."""

import signal
import socket

import pytest

from bigscl.common.failures import STOPPED
from bigscl.store import HeatmapStore, StorageOptions
from tests.builders import index_of, write_config
from tests.forks import CREDENTIALS, Child, trainer_server
from tests.integration.runs import (
    assert_same_rows,
    assert_same_weights,
    losses_of,
    memory_of,
    train,
    weights_of,
)
from tests.servers import make_bucket, s3_server
from tests.test_tools.view_site import serving

BUCKET = "s3://images"


@pytest.fixture(scope="module")
def server(shards):
    """An S3-compatible server with the shards, and its address."""
    with s3_server() as address:
        make_bucket(address, "images", shards.glob("*.tar"))
        yield address


def environment_of(address):
    return {**CREDENTIALS, "AWS_ENDPOINT_URL": address}


@pytest.fixture(autouse=True)
def reachable(server, monkeypatch):
    for name, value in environment_of(server).items():
        monkeypatch.setenv(name, value)


def call(server, module, *words, processes=1):
    """Do what `python -m module words` does, in forks that reach the server."""
    done = trainer_server().run_module(
        module, *words, processes=processes, environment=environment_of(server)
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def remote(server, shards, tmp_path_factory):
    """The sections `data` of remote tars, by how they are named, with indexes that were made from them."""
    folder = tmp_path_factory.mktemp("indexes")
    for part in ("train", "val"):
        words = (f"{BUCKET}/{part}-*.tar", "--output", folder / f"{part}.npz")
        call(server, "bigscl", "index", *words, "--classes", shards / "classes.txt")
    given = {
        "train_index": str(folder / "train.npz"),
        "val": f"{BUCKET}/val-*.tar",
        "val_index": str(folder / "val.npz"),
    }
    names = sorted(path.name for path in shards.glob("train-*.tar"))
    first, last = (name.removeprefix("train-").removesuffix(".tar") for name in (names[0], names[-1]))
    return {
        "glob": {**given, "train": f"{BUCKET}/train-*.tar"},
        "braces": {**given, "train": f"{BUCKET}/train-{{{first}..{last}}}.tar"},
    }


@pytest.mark.parametrize(
    ("tars", "store", "workers", "processes"), [("glob", "s3", 2, 1), ("braces", "disk", 1, 2)]
)
def test_a_run_on_remote_tars_with_workers_equals_one_on_local_tars(
    server, remote, shards, tmp_path, tars, store, workers, processes
):
    """Validation reads remote tars too, and so do an evaluation, an export and the page of the run."""
    local = {"workers": workers, "val": str(shards / "val-*.tar")}
    train(write_config(tmp_path / "local.yaml", shards, data=local), processes=processes)
    url = f"{BUCKET}/stores/{tars}-{workers}" if store == "s3" else str(tmp_path / "memory")
    config = write_config(
        tmp_path / "run.yaml", shards, data={**remote[tars], "workers": workers}, store={"url": url}
    )
    call(server, "bigscl.train", config, processes=processes)
    one, other = tmp_path / "run", tmp_path / "local"
    assert losses_of(one) == losses_of(other)
    assert_same_weights(weights_of(one), weights_of(other))
    index = index_of(shards)
    with HeatmapStore.open(url, annotations=index.annotations(), options=StorageOptions()) as opened:
        assert_same_rows(opened.read(index.ids()), memory_of(other, shards))
    if processes == 1:
        evaluate = ("evaluate", one, "--workers", workers, "--output", tmp_path / "evaluated")
        export = ("export", one, "labels", "--format", "coco", "--output", tmp_path / "labels.json")
        for words in (evaluate, export):
            call(server, "bigscl", *words)
        with serving(one) as site:
            assert site.ask("/api/thumbnail?row=0").status == 200


def test_sigterm_ends_a_run_whose_tars_do_not_answer(remote, shards, tmp_path):
    """Its workers wait for the server, and no step comes that could stop."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(64)
        silent.settimeout(120)
        # Braces name the tars without asking the server for a list.
        tars = {name: remote["braces"][name] for name in ("train", "train_index")}
        config = write_config(tmp_path / "run.yaml", shards, data={**tars, "workers": 1})
        output = tmp_path / "output.txt"
        environment = environment_of(f"http://127.0.0.1:{silent.getsockname()[1]}")
        running = Child(trainer_server(), "bigscl.train", config, output=output, environment=environment)
        try:
            asked, _ = silent.accept()
            with asked:
                running.send_signal(signal.SIGTERM)
                code = running.wait(60)
        finally:
            running.kill()
    errors = output.read_text()
    assert code == STOPPED, errors
    assert "no batch has come for" in errors
    assert errors.endswith("ended without saving. Resume with the same command.\n")
