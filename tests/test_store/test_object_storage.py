"""Object storage by URL scheme: how URLs are read, and that stores and tars work on every scheme."""

import json

import numpy as np
import pytest

from bigscl.data.open_tar import open_shard
from bigscl.data.tar import expand
from bigscl.preflight.environment import probe_place
from bigscl.store import SCHEMES, STORE_SCHEMES, HeatmapStore, SingleProcess, StorageOptions, StoreError
from bigscl.store.backends.backend import open_backend
from bigscl.store.backends.schemes import Location
from bigscl.store.errors import AlreadyExists, StorageFailed
from tests.fake_buckets import fake_buckets
from tests.test_store.conftest import assert_same_rows, make_annotations
from tests.test_store.test_bad_connections import epochs

NO_LOGIN = {"disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}


@pytest.fixture(scope="module")
def server():
    with fake_buckets() as url:
        yield url


def reach(server, monkeypatch):
    """Let the environment name this server for gs and az."""
    monkeypatch.setenv("GOOGLE_SERVICE_ACCOUNT_KEY", json.dumps({"gcs_base_url": server, **NO_LOGIN}))
    monkeypatch.setenv("GOOGLE_BASE_URL", server)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", server)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "account")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", "a2V5")


@pytest.fixture(params=["gs", "az"])
def scheme(request, server, monkeypatch):
    """A scheme whose server runs on loopback, found by its environment variables."""
    reach(server, monkeypatch)
    return request.param


@pytest.mark.parametrize("scheme", STORE_SCHEMES)
def test_a_url_names_a_bucket_and_a_path(scheme):
    location = Location.parse(f"{scheme}://bucket/a/b.tar")
    assert (location.scheme, location.bucket, location.path) == (scheme, "bucket", "a/b.tar")
    with pytest.raises(StoreError, match=rf"expected {scheme}://bucket/prefix"):
        Location.parse(f"{scheme}:///a")
    with pytest.raises(StoreError, match="an endpoint such as"):
        Location.parse(f"{scheme}://bucket/a", StorageOptions(endpoint="nonsense"))


def test_options_come_before_the_environment(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://environment:1")
    assert Location.parse("s3://bucket/a").endpoint == "http://environment:1"
    options = StorageOptions(endpoint="http://options:2")
    assert Location.parse("s3://bucket/a", options).endpoint == "http://options:2"


@pytest.mark.parametrize("url", ["http://host/store", "ftp://host/store"])
def test_no_store_where_nothing_can_be_written(url):
    with pytest.raises(StoreError, match=r"no stores behind .*s3://, gs://, az://"):
        open_backend(url)


def only_connection_string(monkeypatch, text):
    for name in ("NAME", "KEY"):
        monkeypatch.delenv(f"AZURE_STORAGE_ACCOUNT_{name}", raising=False)
    monkeypatch.delenv("AZURE_STORAGE_ENDPOINT", raising=False)
    monkeypatch.setenv("AZURE_STORAGE_CONNECTION_STRING", text)


def test_azure_needs_an_account(monkeypatch):
    only_connection_string(monkeypatch, "")
    with pytest.raises(StoreError, match=r"set AZURE_STORAGE_ACCOUNT_NAME .*AZURE_STORAGE_CONNECTION_STRING"):
        open_backend("az://container/store")


@pytest.mark.parametrize(
    "credentials", ["AccountName=account;AccountKey=a2V5MQ==", "SharedAccessSignature=?sv=2022&sig=secret%3D"]
)
def test_azures_connection_string_is_enough(server, monkeypatch, credentials):
    only_connection_string(
        monkeypatch, f"DefaultEndpointsProtocol=http;{credentials};BlobEndpoint={server}/;"
    )
    backend = open_backend("az://connected/files")
    backend.create("one", b"first")
    assert backend.read("one") == b"first"
    backend.delete("one")


@pytest.mark.parametrize(
    ("text", "endpoint", "account"),
    [
        ("AccountName=me;AccountKey=a2V5;EndpointSuffix=core.x.cn", "https://me.blob.core.x.cn", "me"),
        ("AccountName=me;AccountKey=a2V5", None, "me"),
        ("BlobEndpoint=https://u.blob.x.net/;SharedAccessSignature=sv=1&sig=2", "https://u.blob.x.net", "u"),
        ("BlobEndpoint=http://127.0.0.1:10000/dev;AccountKey=a2V5", "http://127.0.0.1:10000/dev", "dev"),
    ],
)
def test_azures_connection_string_says_account_and_server(monkeypatch, text, endpoint, account):
    only_connection_string(monkeypatch, text)
    location = Location.parse("az://container/a")
    assert location.endpoint == endpoint
    assert location.client().config["account_name"] == account
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "other")
    assert Location.parse("az://container/a").endpoint is None
    assert "account_name" not in location.client().config  # the client takes it from the environment


def test_a_connection_string_without_an_account_is_refused_unseen(monkeypatch):
    only_connection_string(monkeypatch, "AccountKey=c2VjcmV0")
    with pytest.raises(StoreError, match="AZURE_STORAGE_CONNECTION_STRING: has no AccountName") as refused:
        open_backend("az://container/store")
    assert "c2VjcmV0" not in str(refused.value)


def test_small_files_are_created_once_swapped_and_deleted(scheme):
    backend = open_backend(f"{scheme}://{scheme}-bucket/files")
    backend.create("folder/one", b"first")
    with pytest.raises(AlreadyExists):
        backend.create("folder/one", b"second")
    assert not backend.swap("folder/one", b"second", b"third")
    assert backend.swap("folder/one", b"first", b"third")
    assert not backend.swap("absent", b"first", b"third")
    backend.replace("folder/two", b"2")
    assert backend.names("") == ["folder"]
    assert list(backend.sizes("folder")) == [("folder/one", 5), ("folder/two", 1)]
    backend.delete_many(["absent", "folder/one", "also/absent"])
    assert backend.names("folder") == ["two"]
    backend.delete_tree("folder")
    backend.delete("absent")
    assert backend.names("") == []


def test_a_store_holds_what_one_on_disk_does(scheme, tmp_path):
    annotations = make_annotations((5, 3, 4), 7)
    expected, visited = epochs(tmp_path / "store", annotations)
    found, also_visited = epochs(f"{scheme}://{scheme}-bucket/store", annotations)
    np.testing.assert_array_equal(visited, also_visited)
    for one, other in zip(found, expected, strict=True):
        assert_same_rows(one, other)


@pytest.mark.parametrize("scheme", ["gs", "az"])
def test_a_server_that_ignores_conditions_is_refused(scheme, monkeypatch):
    """It would let two runs commit different snapshots of one number."""
    annotations, objects = make_annotations(), {}
    told = "created again, expected to be refused: this server ignores conditions"
    with fake_buckets(objects) as good, fake_buckets(objects, keeps_conditions=False) as bad:
        reach(bad, monkeypatch)
        with pytest.raises(StorageFailed, match=told):
            HeatmapStore.create(f"{scheme}://bucket/store", annotations, heatmap_size=3)
        assert objects == {}
        (problem,) = probe_place(f"{scheme}://bucket/store", StorageOptions(), SingleProcess())
        assert told in problem
        assert objects == {}
        reach(good, monkeypatch)
        HeatmapStore.create(f"{scheme}://bucket/store", annotations, heatmap_size=3)
        assert probe_place(f"{scheme}://bucket/store", StorageOptions(), SingleProcess()) == []
        before = dict(objects)
        reach(bad, monkeypatch)
        with pytest.raises(StorageFailed, match=told):
            HeatmapStore.open(f"{scheme}://bucket/store", annotations=annotations, mode="w", run="run")
        assert objects == before
        assert HeatmapStore.open(f"{scheme}://bucket/store").snapshot.id == 0


def test_tars_are_listed_and_read(scheme):
    backend = open_backend(f"{scheme}://{scheme}-bucket/tars")
    for number in range(3):
        backend.create(f"train-{number}.tar", bytes([number]) * 100_000)
    urls = [f"{scheme}://{scheme}-bucket/tars/train-{number}.tar" for number in range(3)]
    assert expand(f"{scheme}://{scheme}-bucket/tars/") == urls
    assert expand(f"{scheme}://{scheme}-bucket/tars/*-[12].tar") == urls[1:]
    assert open_shard(urls[2]).read_at(50_000, 10) == bytes([2]) * 10


def test_every_scheme_says_what_to_do_about_credentials():
    assert all(scheme.credentials.missing and scheme.credentials.refused for scheme in SCHEMES.values())
