"""Object stores behind a bad connection: what was done is done once, what fails says why in one line."""

import re
from datetime import timedelta

import numpy as np
import pytest

from bigscl.store import HeatmapStore, StorageOptions, StoreError, update
from bigscl.store.backends import retries
from bigscl.store.backends import schemes as object_storage
from bigscl.store.backends.backend import open_backend
from bigscl.store.errors import AlreadyExists
from bigscl.store.lease import Lease
from tests.faulty_proxy import Chances, faulty_proxy
from tests.test_store.conftest import all_ids, assert_same_rows, make_annotations, random_update


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Pauses that suit a server on loopback."""
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(retries, "LONGEST_PAUSE_SECONDS", 0.2)
    monkeypatch.setattr(retries, "FIRST_CONTACT_SECONDS", 20.0)
    milliseconds = timedelta(milliseconds=5)
    backoff = {"init_backoff": milliseconds, "max_backoff": 4 * milliseconds, "base": 2}
    monkeypatch.setattr(object_storage, "RETRY_CONFIG", {**object_storage.RETRY_CONFIG, "backoff": backoff})


def first(method, ending, fault, times=1):
    """Spoil the first requests of a kind to a key."""
    return lambda found, path, count: (
        fault if found == method and path.endswith(ending) and count < times else None
    )


def options_for(proxy):
    return StorageOptions(endpoint=proxy.endpoint, region="us-east-1")


@pytest.fixture
def url(request):
    """A place of its own for each test, and the same each time: the proxy draws its faults by path."""
    return f"s3://bucket/{re.sub(r'[^a-z0-9]+', '-', request.node.name)}"


@pytest.mark.parametrize("times", [1, 3])
def test_a_commit_whose_answer_got_lost_is_a_commit(s3_options, url, annotations, times):
    HeatmapStore.create(url, annotations, heatmap_size=2, options=s3_options)
    with faulty_proxy(s3_options.endpoint, first("PUT", "/00000001.json", "lose", times)) as proxy:
        options = options_for(proxy)
        with HeatmapStore.open(url, annotations=annotations, mode="w", options=options) as store:
            update(store, 0, np.arange(2), random_update(store, 2, seed=0))
            while store.snapshot.id < 3:
                snapshot = store.commit(epoch=0)
    assert proxy.faults == {"lose": times}
    assert HeatmapStore.open(url, options=s3_options).snapshot == snapshot


def test_a_store_is_created_once_although_answers_get_lost(s3_options, url, annotations):
    with faulty_proxy(s3_options.endpoint, first("PUT", ".json", "lose")) as proxy:
        HeatmapStore.create(url, annotations, heatmap_size=2, options=options_for(proxy))
        with pytest.raises(AlreadyExists, match="there is a store already"):
            HeatmapStore.create(url, annotations, heatmap_size=2, options=options_for(proxy))
    assert proxy.faults["lose"] > 5


def test_a_lease_whose_answer_got_lost_is_ours(s3_options, url):
    with faulty_proxy(s3_options.endpoint, first("PUT", "/lease.json", "lose")) as proxy:
        backend = open_backend(url, options_for(proxy))
        lease = Lease.acquire(backend, "ours")
        lease.check()
        lease.release()
    assert proxy.faults == {"lose": 1}


def test_somebody_elses_bytes_are_not_taken_for_ours(s3_options, url):
    open_backend(url, s3_options).create("lease.json", b"theirs")
    with faulty_proxy(s3_options.endpoint, first("PUT", "/lease.json", "lose")) as proxy:
        with pytest.raises(AlreadyExists):
            open_backend(url, options_for(proxy)).create("lease.json", b"ours")


def test_a_swap_whose_answer_got_lost_is_done(s3_options, url):
    open_backend(url, s3_options).create("lease.json", b"old")
    with faulty_proxy(s3_options.endpoint, first("PUT", "/lease.json", "lose")) as proxy:
        backend = open_backend(url, options_for(proxy))
        assert backend.swap("lease.json", b"old", b"new")
        assert not backend.swap("lease.json", b"old", b"newer")
    assert proxy.faults == {"lose": 1}


def test_swap_works_where_conditional_updates_are_not_implemented(s3_options, url, monkeypatch):
    from obstore.exceptions import NotSupportedError

    backend = open_backend(url, s3_options)
    backend.create("lease.json", b"old")
    put = backend._put

    def refuse_updates(key, data, mode):
        if isinstance(mode, dict):
            raise NotSupportedError("conditional updates")
        put(key, data, mode)

    monkeypatch.setattr(backend, "_put", refuse_updates)
    assert backend.swap("lease.json", b"old", b"new")
    assert not backend.swap("lease.json", b"old", b"newer")
    assert backend.read("lease.json") == b"new"


def test_bodies_that_break_off_are_read_again(s3_options, url):
    data = bytes(np.random.default_rng(0).integers(0, 256, 300_000, dtype=np.uint8))
    open_backend(url, s3_options).create("object", data)
    with faulty_proxy(s3_options.endpoint, first("GET", "/object", "cut", times=12)) as proxy:
        assert open_backend(url, options_for(proxy)).read("object") == data
    assert proxy.faults["cut"] >= 12


def test_words_in_an_address_are_not_taken_for_a_reason(s3_options, url):
    place = f"{url}/credentials/redirect"
    with faulty_proxy(
        s3_options.endpoint, lambda method, path, count: "drop" if count < 12 else None
    ) as proxy:
        backend = open_backend(place, options_for(proxy))
        backend.create("NoSuchBucket", b"1")
        assert backend.names("") == ["NoSuchBucket"]
    assert proxy.faults == {"drop": 24}
    assert open_backend(place, s3_options).read("latest/meta-data") is None


def test_chunks_that_break_off_are_read_again(s3_options, url, annotations):
    ids = all_ids(annotations)
    HeatmapStore.create(url, annotations, heatmap_size=4, options=s3_options)
    with HeatmapStore.open(url, annotations=annotations, mode="w", options=s3_options) as store:
        update(store, 0, ids, random_update(store, len(ids), seed=0))
        store.commit(epoch=0)
        expected = store.read(ids)
    with faulty_proxy(s3_options.endpoint, lambda method, path, count: "cut" if count < 4 else None) as proxy:
        assert_same_rows(HeatmapStore.open(url, options=options_for(proxy)).read(ids), expected)
    assert proxy.faults["cut"] > 10


def epochs(place, annotations, options=None):
    """Create a store, train three epochs of it, compact it, go back, and give back all it held on the way."""
    ids = all_ids(annotations)
    seen = []
    HeatmapStore.create(place, annotations, heatmap_size=4, options=options)
    with HeatmapStore.open(place, annotations=annotations, mode="w", options=options) as store:
        for epoch in range(3):
            update(store, epoch, ids, random_update(store, len(ids), seed=epoch))
            store.commit(epoch=epoch, step=epoch)
            store.record_history(epoch)
            store.drop_snapshots(keep=[store.snapshot.parent])
            seen.append(store.read(ids))
        store.compact(top=3)
        store.drop_snapshots()
        update(store, 3, ids, random_update(store, len(ids), seed=3))
        store.commit(epoch=3)
        seen.append(store.read(ids))
    reader = HeatmapStore.open(place, options=options)
    return [*seen, reader.read(ids)], reader.last_epochs()


@pytest.mark.parametrize(
    "chance", [0.1, pytest.param(0.05, marks=pytest.mark.slow), pytest.param(0.2, marks=pytest.mark.slow)]
)
def test_a_store_behind_a_bad_connection_holds_what_one_on_disk_does(s3_options, url, tmp_path, chance):
    annotations = make_annotations((5, 3, 4), 7)
    expected, visited = epochs(tmp_path / "store", annotations)
    chances = Chances(drop=chance, error=chance, lose=chance, cut=chance, seed=1)
    with faulty_proxy(s3_options.endpoint, chances) as proxy:
        found, also_visited = epochs(url, annotations, options_for(proxy))
    assert set(proxy.faults) == {"drop", "error", "lose", "cut"}
    np.testing.assert_array_equal(visited, also_visited)
    for one, other in zip(found, expected, strict=True):
        assert_same_rows(one, other)


def one_line(caught):
    text = str(caught.value)
    assert "\n" not in text
    assert "Debug source" not in text
    return text


@pytest.fixture
def silent():
    """An endpoint where nobody listens."""
    import socket

    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{unused.getsockname()[1]}"


def test_a_server_that_is_not_there_is_one_line(silent, url, monkeypatch, s3_options):
    monkeypatch.setattr(retries, "FIRST_CONTACT_SECONDS", 0.5)
    backend = open_backend(url, StorageOptions(endpoint=silent))
    with pytest.raises(
        StoreError, match=r"could not list the store: .*Connection refused.*gave up"
    ) as caught:
        backend.names("")
    assert f"{url} at {silent}" in one_line(caught)


def test_a_server_that_goes_away_is_one_line_for_chunks_too(s3_options, url, annotations, monkeypatch):
    monkeypatch.setattr(retries, "RETRY_SECONDS", 0.5)
    HeatmapStore.create(url, annotations, heatmap_size=2, options=s3_options)
    away = []
    with faulty_proxy(s3_options.endpoint, lambda *request: "drop" if away else None) as proxy:
        store = HeatmapStore.open(url, annotations=annotations, mode="w", options=options_for(proxy))
        away.append(True)
        with pytest.raises(StoreError, match="closed before the answer") as caught:
            update(store, 0, np.array([0]), random_update(store, 1, seed=0))
        away.clear()
        store.close()
    one_line(caught)


@pytest.mark.parametrize(
    "operation", ["names", "read", "create", "replace", "delete", "delete_tree", "sizes"]
)
def test_a_bucket_that_is_not_there_fails_at_once_in_one_line(s3_options, operation):
    backend = open_backend("s3://no-such-bucket/prefix", s3_options)
    arguments = {"create": ("key", b"1"), "replace": ("key", b"1")}.get(operation, ("key",))
    with pytest.raises(StoreError, match=r"NoSuchBucket.*Create the bucket, or correct its name") as caught:
        list(getattr(backend, operation)(*arguments) or ())
    one_line(caught)


def test_refused_credentials_fail_at_once_in_one_line(s3_options, url):
    with faulty_proxy(s3_options.endpoint, lambda *request: "refuse") as proxy:
        with pytest.raises(StoreError, match=r"403 .*InvalidAccessKeyId.*Check AWS_ACCESS_KEY_ID") as caught:
            HeatmapStore.open(url, options=options_for(proxy))
    one_line(caught)
    assert len(proxy.requests) == 1


def test_missing_credentials_are_one_line(s3_options, url, silent, monkeypatch):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    # Where a machine's own credentials would come from: nobody may be asked here.
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", silent)
    with pytest.raises(StoreError, match="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") as caught:
        HeatmapStore.open(url, options=s3_options)
    one_line(caught)


@pytest.mark.parametrize("endpoint", ["nonsense", "http://", "http://host:1 2", "ftp://host"])
def test_a_garbled_endpoint_is_one_line(url, endpoint):
    with pytest.raises(StoreError, match=r"expected s3://bucket/prefix and.* an endpoint such as") as caught:
        open_backend(url, StorageOptions(endpoint=endpoint)).names("")
    one_line(caught)


def test_patience_ends(monkeypatch):
    from obstore.exceptions import GenericError

    monkeypatch.setattr(retries, "FIRST_CONTACT_SECONDS", 0.05)

    def fail():
        raise GenericError("busy - Server returned non-2xx status code: 503 Slow Down: ")

    with pytest.raises(
        StoreError, match=r"place: could not try: 503 Slow Down; gave up after \d tries in 0 s"
    ):
        retries.RetryPolicy("place", object_storage.SCHEMES["s3"].credentials).call("try", fail)
