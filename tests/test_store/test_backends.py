"""The small files of a store on every backend: created once, swapped atomically, deleted in numbers."""

import errno
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from bigscl.store import HeatmapStore
from bigscl.store.backends.backend import LocalBackend, check_creates_once, open_backend
from bigscl.store.errors import AlreadyExists, StorageFailed, StoreError


@pytest.fixture
def backend(place):
    return open_backend(*place)


def test_a_file_is_created_once(backend):
    backend.create("folder/one", b"first")
    with pytest.raises(AlreadyExists, match="exists already"):
        backend.create("folder/one", b"second")
    assert backend.read("folder/one") == b"first"


def test_swap_replaces_the_content_it_was_told_of_and_no_other(backend):
    backend.create("lease", b"mine")
    assert not backend.swap("lease", b"yours", b"new")
    assert backend.read("lease") == b"mine"
    assert backend.swap("lease", b"mine", b"new")
    assert backend.read("lease") == b"new"
    assert not backend.swap("absent", b"mine", b"new")
    assert backend.read("absent") is None
    assert backend.names("") == ["lease"]


def test_of_many_who_swap_one_wins(backend):
    backend.create("lease", b"old")
    claims = [f"claim {n}".encode() for n in range(8)]
    with ThreadPoolExecutor(8) as pool:
        won = [
            claim
            for claim, ours in zip(
                claims, pool.map(lambda c: backend.swap("lease", b"old", c), claims), strict=True
            )
            if ours
        ]
    assert won == [backend.read("lease")]


def test_swap_puts_back_a_file_that_changed_after_it_was_read(tmp_path, monkeypatch):
    backend = LocalBackend(tmp_path)
    backend.create("lease", b"third party's")
    monkeypatch.setattr(backend, "read", lambda key: b"old")
    assert not backend.swap("lease", b"old", b"new")
    assert os.listdir(tmp_path) == ["lease"]
    assert (tmp_path / "lease").read_bytes() == b"third party's"


def test_a_link_that_was_made_but_reported_as_failed_is_a_success(tmp_path, monkeypatch):
    """NFS: the answer to the first request got lost, the second one finds the name taken, by us."""
    link = os.link

    def link_and_fail(source, target):
        link(source, target)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", link_and_fail)
    backend = LocalBackend(tmp_path)
    backend.create("lease", b"ours")
    assert backend.swap("lease", b"ours", b"ours again")
    assert backend.read("lease") == b"ours again"
    monkeypatch.setattr(os, "link", link)
    with pytest.raises(AlreadyExists):
        backend.create("lease", b"ours again")
    assert backend.names("") == ["lease"]


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_hard_links_is_refused_in_one_line(tmp_path, annotations, monkeypatch, number):
    """As mounted buckets answer (FUSE)."""

    def no_links(source, target):
        raise OSError(number, os.strerror(number))

    HeatmapStore.create(tmp_path / "before", annotations, heatmap_size=3)
    monkeypatch.setattr(os, "link", no_links)
    told = r"this file system has no hard links .*which commits need\. .*store\.url: s3://bucket/prefix"
    with pytest.raises(StorageFailed, match=told) as raised:
        HeatmapStore.create(tmp_path / "store", annotations, heatmap_size=3)
    assert "\n" not in str(raised.value)
    with pytest.raises(StorageFailed, match="no hard links"):
        HeatmapStore.open(tmp_path / "before", annotations=annotations, mode="w", run="run")
    assert not list(tmp_path.rglob("*.partial"))


def test_probing_a_place_leaves_nothing_behind(backend):
    check_creates_once(backend)
    assert backend.names("") == []


def test_a_probe_that_another_process_tidied_away_is_tried_again(tmp_path):
    class Tidied(LocalBackend):
        tries = 0

        def create(self, key, data):
            super().create(key, data)
            self.tries += 1
            if self.tries == 1:
                self.delete(key)

    backend = Tidied(tmp_path)
    check_creates_once(backend)
    assert backend.tries == 3  # twice the first name, once the second


def test_a_folder_that_cannot_be_synced_is_an_error_and_the_file_is_there(tmp_path, monkeypatch):
    sync = os.fsync

    def sync_files_only(descriptor):
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EIO, "Input/output error")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", sync_files_only)
    backend = LocalBackend(tmp_path)
    with pytest.raises(StoreError, match=r"has its name.*could not be synced \(Input/output error\)"):
        backend.create("snapshot", b"content")
    assert backend.read("snapshot") == b"content"


def test_delete_many_removes_what_is_there(backend):
    keys = [f"folder/{n}" for n in range(1100)]
    for key in keys[:3] + keys[-2:]:
        backend.create(key, b"x")
    backend.create("folder/kept", b"x")
    backend.delete_many(iter(keys))
    backend.delete_many([])
    backend.delete_many(["no/such/folder"])
    assert backend.names("folder") == ["kept"]
