"""Damaged files of a store: our own errors with the file's name, and nothing else."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigscl.store import HeatmapStore, StoreError, seal, update
from bigscl.store.backends.backend import open_backend
from bigscl.store.errors import AlreadyExists, BadFile
from bigscl.store.format.fields import as_table, to_table
from bigscl.store.lease import Holder, Lease, break_lease, read_holder
from bigscl.store.snapshots import Snapshot
from tests.test_store.conftest import all_ids, assert_same_rows, make_annotations, random_update

ANNOTATIONS = make_annotations()
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inside: st.lists(inside, max_size=4) | st.dictionaries(st.text(), inside, max_size=4),
    max_leaves=8,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A store with commits and a lease, by its small files."""
    path = tmp_path_factory.mktemp("stores") / "store"
    HeatmapStore.create(path, ANNOTATIONS, heatmap_size=2)
    with HeatmapStore.open(path, annotations=ANNOTATIONS, mode="w", run="run") as store:
        for epoch in range(2):
            update(store, epoch, all_ids(ANNOTATIONS), random_update(store, 12, seed=epoch))
            store.commit(epoch=epoch)
        (path / "lease.copy").write_bytes((path / "lease.json").read_bytes())
    (path / "lease.copy").rename(path / "lease.json")
    return path


def small_files(path):
    names = ["zarr.json", "arrays-000/zarr.json", "arrays-000/scores/zarr.json", "lease.json"]
    return [*names, *(f"snapshots/{each.name}" for each in sorted((path / "snapshots").iterdir()))]


def open_every_way(path):
    """All that reads small files; what it raises must be ours and must name a file of the store."""
    calls = [
        lambda: HeatmapStore.open(path).read([0]),
        lambda: read_holder(open_backend(path)),
        lambda: HeatmapStore.open(path, annotations=ANNOTATIONS, mode="w", patience_seconds=0).close(),
    ]
    errors = []
    for call in calls:
        try:
            call()
        except StoreError as error:
            errors.append(error)
    assert all(str(path) in str(error) for error in errors)
    return errors


@pytest.fixture
def damaged(whole):
    """Put bytes into one of the store's files; the store is restored afterwards."""
    before = {file: file.read_bytes() for file in whole.rglob("*") if file.is_file()}

    def damage(name, data):
        (whole / name).write_bytes(data)
        return whole

    yield damage
    for file in [each for each in whole.rglob("*") if each.is_file() and each not in before]:
        file.unlink()
    for file, data in before.items():
        file.write_bytes(data)


@pytest.mark.parametrize("data", [b"", b"\0" * 200, b"{", b"[]", b"{}", b"null", b"9" * 5000, b"[" * 100_000])
@pytest.mark.parametrize("name", ["zarr.json", "arrays-000/zarr.json", "snapshots/00000003.json"])
def test_a_torn_file_is_named(damaged, name, data):
    errors = open_every_way(damaged(name, data))
    assert errors
    assert any(Path(name).name in str(error) or "not a heatmap store" in str(error) for error in errors)


HOSTILE = {
    "slots": [-5, [-5, 0, 0], [99999, 0, 0], [0, 0], ["0", "0", "0"], [True, False, True], [0.0, 0.0, 0.0]],
    "epoch": [-2, "1", None, 2**80, 1.5],
    "id": [None, 7, "3", -1],
    "group": ["", "arrays-001", "../../etc", "arrays-\0", 5, None],
    "attributes": [None, [], 3],
    "digests": [
        [],
        {"scores": [1, 2, 3]},
        {"scores": "no base64"},
        {"scores": to_table(as_table([1]))},
        {"scores": to_table(as_table([-9, 0, 0]))},
        {"scores": to_table(as_table([0, 0, 0]))[:-3]},
        None,
    ],
    "time": ["now", None],
    "run": [3, None],
}


@pytest.mark.parametrize(
    ("field", "value"), [(name, value) for name, all_ in HOSTILE.items() for value in all_]
)
def test_a_snapshot_with_a_field_that_cannot_be_is_refused(damaged, whole, field, value):
    values = json.loads((whole / "snapshots/00000003.json").read_text())
    path = damaged("snapshots/00000003.json", json.dumps(seal({**values, field: value})).encode())
    with pytest.raises(StoreError):
        HeatmapStore.open(path, annotations=ANNOTATIONS).read(all_ids(ANNOTATIONS))


@pytest.mark.parametrize("array", ["", "scores/", "samples/"])
def test_metadata_is_that_of_the_creation_or_refused(damaged, whole, array):
    """A flipped byte leaves the same rows, or gives an error of ours."""
    name = f"arrays-000/{array}zarr.json"
    before = (whole / name).read_bytes()
    expected = HeatmapStore.open(whole).read(all_ids(ANNOTATIONS))
    for place in range(0, len(before), 7):
        changed = bytearray(before)
        changed[place] ^= 1
        with contextlib.suppress(StoreError):
            found = HeatmapStore.open(damaged(name, bytes(changed))).read(all_ids(ANNOTATIONS))
            assert_same_rows(found, expected)


def test_files_of_earlier_revisions_are_refused_in_one_line(damaged, whole):
    values = json.loads((whole / "snapshots/00000003.json").read_text())
    del values["crc32"]
    path = damaged("snapshots/00000003.json", json.dumps(values).encode())
    with pytest.raises(BadFile, match=r"00000003\.json: has no digest .* earlier revision"):
        HeatmapStore.open(path)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_json_in_any_field_raises_only_our_errors(whole, data):
    name = data.draw(st.sampled_from([each for each in small_files(whole) if "scores" not in each]))
    values = json.loads((whole / name).read_text())
    inside = values.get("attributes", {}).get("bigscl", values)
    field = data.draw(st.sampled_from(sorted(inside)))
    inside[field] = data.draw(JSON)
    if data.draw(st.booleans()):
        inside.update(seal(inside))
    raw = json.dumps(values).encode()
    check(name, raw, whole)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_changed_bytes_raise_only_our_errors(whole, data):
    name = data.draw(st.sampled_from(small_files(whole)))
    raw = bytearray((whole / name).read_bytes())
    start = data.draw(st.integers(0, len(raw)))
    end = data.draw(st.integers(start, min(len(raw), start + 40)))
    raw[start:end] = data.draw(st.binary(max_size=20))
    check(name, bytes(raw), whole)


def check(name, raw, whole):
    """Reading a damaged file gives a value or our own error."""
    before = (whole / name).read_bytes()
    (whole / name).write_bytes(raw)
    try:
        for call in (
            lambda: Snapshot.from_bytes(raw, name),
            lambda: Holder.from_bytes(raw, name),
            lambda: HeatmapStore.open(whole, annotations=ANNOTATIONS).read(all_ids(ANNOTATIONS)),
            lambda: read_holder(open_backend(whole)),
        ):
            with contextlib.suppress(StoreError):
                call()
    finally:
        (whole / name).write_bytes(before)


def test_a_garbled_lease_is_named_and_can_be_broken(tmp_path):
    backend = open_backend(tmp_path)
    (tmp_path / "lease.json").write_bytes(b"\0\0\0")
    with pytest.raises(BadFile, match=r"lease\.json: holds only NUL bytes.*unlock --force"):
        Lease.acquire(backend, "next")
    assert break_lease(backend) is None
    Lease.acquire(backend, "next").release()


@pytest.mark.parametrize("missing", ["zarr.json", "snapshots"])
def test_a_store_with_a_chunk_or_a_snapshot_is_never_created_over(tmp_path, missing):
    """As an unfinished copy leaves it."""
    path = tmp_path / "store"
    HeatmapStore.create(path, ANNOTATIONS, heatmap_size=2)
    with HeatmapStore.open(path, annotations=ANNOTATIONS, mode="w", run="run") as store:
        update(store, 0, all_ids(ANNOTATIONS), random_update(store, 12, seed=0))
        store.commit(epoch=0)
    for file in [path / missing] if missing == "zarr.json" else list((path / missing).iterdir()):
        file.unlink()
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises((BadFile, AlreadyExists)):
        HeatmapStore.create(path, ANNOTATIONS, heatmap_size=2)
    with pytest.raises(BadFile, match="copy"):
        HeatmapStore.open(path)
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_snapshots_alone_are_not_created_over(tmp_path):
    path = tmp_path / "store"
    HeatmapStore.create(path, ANNOTATIONS, heatmap_size=2)
    for name in ("zarr.json", "arrays-000/zarr.json"):
        (path / name).unlink()
    with pytest.raises(BadFile, match=r"zarr\.json: is missing, but the store has snapshots"):
        HeatmapStore.create(path, ANNOTATIONS, heatmap_size=2)
