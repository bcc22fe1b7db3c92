"""Tars behind a bad connection: resumed from the byte reached, never mixed with another object."""

import gzip
import os
import re
from contextlib import closing
from dataclasses import replace
from datetime import timedelta

import numpy as np
import pytest

from bigscl.data.build_index import scan
from bigscl.data.epoch_plan import Stream
from bigscl.data.open_tar import Unreadable, open_shard
from bigscl.data.read_samples import encoded_images
from bigscl.data.tar import expand
from bigscl.store import StoreError
from bigscl.store.backends import retries, streams
from bigscl.store.backends import schemes as object_storage
from tests.builders import write_shards
from tests.faulty_proxy import Chances, faulty_proxy
from tests.servers import QuietHandler, make_bucket, web_server

SIZES = [9, 7, 8, 9, 5]
CONTENT = bytes(np.random.default_rng(0).integers(0, 256, 400_000, dtype=np.uint8))


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """Pauses that suit a server on loopback, of which nothing is known yet."""
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(retries, "LONGEST_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(streams, "_patience", {})
    # Every byte that came in counts.
    monkeypatch.setattr(streams, "PART_BYTES", 1)
    milliseconds = timedelta(milliseconds=5)
    backoff = {"init_backoff": milliseconds, "max_backoff": 4 * milliseconds, "base": 2}
    monkeypatch.setattr(object_storage, "RETRY_CONFIG", {**object_storage.RETRY_CONFIG, "backoff": backoff})


class RangeHandler(QuietHandler):
    """Serves a folder with entity tags and ranges."""

    respects_conditions = True
    tells_versions = True

    def do_GET(self):  # noqa: N802
        with open(self.translate_path(self.path), "rb") as file:
            data = file.read()
        tag = f'"{hash(data):x}"'
        wanted = re.match(r"bytes=(\d+)-", self.headers.get("Range", ""))
        if self.respects_conditions and self.headers.get("If-Match", tag) != tag:
            self.send_error(412)
            return
        first = int(wanted[1]) if wanted else 0
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{len(data) - 1}/{len(data)}")
        if self.tells_versions:
            self.send_header("ETag", tag)
        self.send_header("Content-Length", str(len(data) - first))
        self.end_headers()
        self.wfile.write(data[first:])


class CarelessHandler(RangeHandler):
    """Gives ranges of whatever is there."""

    respects_conditions = False


class UntaggedHandler(CarelessHandler):
    """Gives ranges of whatever is there, and does not say what that is."""

    tells_versions = False


def read_whole(url):
    with closing(open_shard(url)) as shard:
        return bytes(shard.read_at(0, len(CONTENT)))


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
def test_a_body_that_breaks_off_is_resumed_from_the_byte_reached(tmp_path, pack):
    stored = pack(CONTENT)
    (tmp_path / "a.tar").write_bytes(stored)
    with web_server(tmp_path, RangeHandler) as server:
        with faulty_proxy(server, lambda method, path, count: "cut" if count < 3 else None) as proxy:
            assert read_whole(f"{proxy.endpoint}/a.tar") == CONTENT
    asked = [headers.get("range", "").partition("-")[0] for _, _, headers in proxy.requests]
    reached = [0, len(stored) // 2]
    for _ in range(2):
        reached.append(reached[-1] + (len(stored) - reached[-1]) // 2)
    assert asked == ["", *(f"bytes={position}" for position in reached[1:])]


@pytest.mark.parametrize("handler", [QuietHandler, RangeHandler, CarelessHandler, UntaggedHandler])
def test_an_object_that_was_replaced_while_it_was_read_is_not_mixed(tmp_path, handler):
    (tmp_path / "a.tar").write_bytes(CONTENT)

    def replace_it(method, path, count):
        if count == 1:
            (tmp_path / "a.tar").write_bytes(CONTENT[::-1])
        return "cut" if count == 0 else None

    with web_server(tmp_path, handler) as server, faulty_proxy(server, replace_it) as proxy:
        with pytest.raises(Unreadable, match=r"replaced while it was read \(at byte 200000\)"):
            read_whole(f"{proxy.endpoint}/a.tar")
    # The client resumes once by itself; it, too, sees that the entity tag is another.
    assert len(proxy.requests) <= 3


def test_what_is_not_there_or_forbidden_is_asked_for_once(tmp_path):
    with web_server(tmp_path) as server:
        for fault, code in ((None, 404), ("refuse", 403)):
            with faulty_proxy(server, lambda *request, fault=fault: fault) as proxy:
                with pytest.raises(Unreadable, match=f"could not read it: {code} "):
                    open_shard(f"{proxy.endpoint}/a.tar")
            assert len(proxy.requests) == 1


def test_a_server_that_went_away_is_waited_for_once(tmp_path, monkeypatch):
    monkeypatch.setattr(streams, "RETRY_SECONDS", 2.0)
    monkeypatch.setattr(streams, "FIRST_CONTACT_SECONDS", 0.1)
    (tmp_path / "a.tar").write_bytes(CONTENT)
    with web_server(tmp_path, RangeHandler) as server:
        with faulty_proxy(server, lambda method, path, count: "drop" if count else "cut") as proxy:
            shard = open_shard(f"{proxy.endpoint}/a.tar")
            with pytest.raises(Unreadable, match="breaks off inside"):
                shard.read_at(0, len(CONTENT))
            waited = len(proxy.requests)
            assert waited > 10
            with pytest.raises(Unreadable, match="breaks off inside"):
                shard.read_at(100, len(CONTENT) - 100)
            assert len(proxy.requests) == waited
            with pytest.raises(Unreadable, match=r"could not read it: .*; gave up after"):
                open_shard(f"{proxy.endpoint}/a.tar")
            assert len(proxy.requests) - waited < waited / 2


@pytest.fixture
def bucket(s3_endpoint, monkeypatch, request):
    """(name, obstore store) of an empty bucket, named alike each time: the proxy draws its faults by path."""
    from obstore.store import S3Store

    name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[-60:].strip("-")
    make_bucket(s3_endpoint, name)
    return name, S3Store(name, endpoint=s3_endpoint, client_options={"allow_http": True})


def test_an_object_in_a_bucket_is_resumed_and_never_mixed(s3_endpoint, bucket, monkeypatch):
    import obstore

    name, store = bucket
    obstore.put(store, "a.tar", CONTENT)
    with faulty_proxy(s3_endpoint, lambda method, path, count: "cut" if count < 9 else None) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        assert read_whole(f"s3://{name}/a.tar") == CONTENT
    assert proxy.faults["cut"] == 9

    def replace_it(method, path, count):
        if count == 1:
            obstore.put(store, "a.tar", CONTENT[::-1])
        return "cut" if count == 0 else None

    with faulty_proxy(s3_endpoint, replace_it) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        with pytest.raises(Unreadable, match="replaced while it was read"):
            read_whole(f"s3://{name}/a.tar")


def images_of(index):
    """(id, bytes) of all images of an index."""
    stream = Stream(shards=np.arange(len(index.urls)), ids=index.ids())
    return {sample_id: bytes(content) for sample_id, content in encoded_images(index, stream)}


def check_passes(shards, place):
    """Index the remote copies of some shards and read them four times."""
    local, _ = scan(shards)
    urls = tuple(f"{place}/{os.path.basename(shard)}" for shard in shards)
    found, problems = scan(list(urls))
    assert problems == []
    assert found.fingerprint == local.fingerprint
    for _ in range(4):
        assert images_of(replace(local, urls=urls)) == images_of(local)


ALL_FAULTS = Chances(drop=0.2, error=0.2, lose=0.2, cut=0.2, seed=3)


def test_a_pass_over_bad_http_reads_what_a_local_one_does(tmp_path):
    shards = write_shards(tmp_path, SIZES)
    with web_server(tmp_path, RangeHandler) as server:
        with faulty_proxy(server, ALL_FAULTS) as proxy:
            check_passes(shards, proxy.endpoint)
    assert proxy.faults.total() > 0


def test_a_pass_over_bad_s3_reads_what_a_local_one_does(s3_endpoint, bucket, tmp_path, monkeypatch):
    import obstore

    name, store = bucket
    shards = write_shards(tmp_path, SIZES)
    for shard in shards:
        with open(shard, "rb") as file:
            obstore.put(store, os.path.basename(shard), file.read())
    with faulty_proxy(s3_endpoint, ALL_FAULTS) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
        check_passes(shards, f"s3://{name}")
    assert proxy.faults.total() > 0


def test_a_bucket_that_is_not_there_is_one_line(s3_endpoint, bucket, monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    with pytest.raises(StoreError, match=r"could not list the shards.*NoSuchBucket") as caught:
        expand("s3://no-such-bucket/train-*.tar")
    with pytest.raises(
        Unreadable, match=r"could not read it: 404.*NoSuchBucket.*Create the bucket"
    ) as opening:
        open_shard("s3://no-such-bucket/train-0.tar")
    assert "\n" not in f"{caught.value}{opening.value}"
