"""The index of scores behind the grid against slow loops over the store; single rows against whole shards."""

import json
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from bigscl.store import ChunkCorrupt, HeatmapStore
from bigscl.store.snapshots import SnapshotLog
from bigscl.tools.shared.open_store import DataFlags, StorageFlags, open_store
from bigscl.tools.shared.shard_passes import expected_at
from bigscl.tools.viewer import index_building, score_index
from bigscl.tools.viewer.index_building import build_index, snapshot_before
from bigscl.tools.viewer.open_run import OpenRun, Places
from bigscl.tools.viewer.score_index import (
    ABSENT,
    ANNOTATED,
    EXPECTED,
    KNOWN,
    PRESENT,
    Against,
    Query,
    disagreement,
    index_name,
    listed,
    open_index,
    rows_with,
)
from tests.builders import learn, make_store
from tests.test_tools.conftest import bigscl


def opened(run):
    data = DataFlags().need("test", str(run), open_store(str(run), None, StorageFlags()).spec)
    return open_store(str(run), None, StorageFlags(), data), data


def everything(index):
    """All pairs of an index."""
    return index.part(0, int(index.offsets[-1]))


def half(bits) -> float:
    return float(np.uint16(bits).view(np.float16))


def reference(store, data):
    """{(row, class): (score, peak, change, flags)} of all pairs, by loops."""
    older = [one for one in store.snapshots() if one.id < store.snapshot.id]
    before = HeatmapStore(store.backend, store.spec, older[-1], data.annotations) if older else None
    expected, found = expected_at(store), {}
    for row in data.index.ids().tolist():
        ids = np.array([row])
        rows = store.read_without_initial_value(ids)
        then = rows.scores if before is None else before.read(ids).scores
        hot = expected.expected(rows.ranked_by(), ids)[0]
        named, there = data.index.labels_of(ids)[0], data.index.labels_of(ids, "full")[0]
        for number in range(store.spec.num_classes):
            peak = 0.0
            if rows.heatmaps is not None and number in rows.kept_classes()[0]:
                place = rows.kept_classes()[0].tolist().index(number)
                peak = float(rows.heatmaps[0, place].max())
            flags = ANNOTATED * (named[number] == 1) + EXPECTED * bool(hot[number])
            flags += PRESENT * (there[number] == 1) + ABSENT * (named[number] == 0) + KNOWN
            score = float(rows.scores[0, number])
            found[row, number] = score, peak, abs(score - float(then[0, number])), flags
    return found


def assert_pairs(pairs, wanted):
    """The index's pairs are those of the reference."""
    for pair in pairs:
        score, peak, change, flags = wanted[int(pair["row"]), int(pair["class"])]
        assert half(pair["score"]) == score
        assert abs(int(pair["peak"]) / 255 - peak) <= 0.5 / 255 + 1e-6
        assert abs(half(pair["change"]) - change) < 1e-3
        assert int(pair["flags"]) == flags


@pytest.fixture(scope="module", params=["dense", "topk"])
def made(request, runs, tmp_path_factory):
    store, data = opened(runs / request.param)
    return store, data, build_index(tmp_path_factory.mktemp("index"), store, data)


def test_index_has_all_pairs_by_class_and_falling_score(made):
    store, data, index = made
    wanted = reference(store, data)
    assert index.complete
    assert len(everything(index)) == len(wanted)
    for number in range(store.spec.num_classes):
        pairs = index.of_class(number)
        assert set(pairs["class"]) == {number}
        assert (np.diff([half(bits) for bits in pairs["score"]]) <= 0).all()
    assert_pairs(everything(index), wanted)


def test_each_order_has_every_sample_once_with_its_strongest_class(made):
    store, data, index = made
    wanted = reference(store, data)
    kept = {row: set(store.read([row]).kept_classes()[0].tolist()) for row in data.index.ids().tolist()}
    value = {
        "surprise": lambda row, c: wanted[row, c][0] if not wanted[row, c][3] & (ANNOTATED | ABSENT) else -1,
        "change": lambda row, c: wanted[row, c][2],
        "heat": lambda row, c: abs(wanted[row, c][0] - wanted[row, c][1]) if c in kept[row] else -1,
    }
    for name, of in value.items():
        pairs = listed(index, Query(order=name), data.index)
        assert sorted(pairs["row"].tolist()) == data.index.ids().tolist()
        assert_pairs(pairs, wanted)
        found = [of(int(pair["row"]), int(pair["class"])) for pair in pairs]
        best = [max(of(int(pair["row"]), c) for c in range(store.spec.num_classes)) for pair in pairs]
        np.testing.assert_allclose(found, best, atol=5e-3)
        assert (np.diff(found) <= 5e-3).all()
        back = listed(index, Query(order=name, reverse=True), data.index)
        assert back["row"].tolist() == pairs["row"].tolist()[::-1]
    assert listed(index, Query(order="row"), data.index)["row"].tolist() == data.index.ids().tolist()


@pytest.mark.parametrize("number", [None, 3])
@pytest.mark.parametrize("order", ["surprise", "score", "change", "heat", "row"])
@pytest.mark.parametrize(
    "asked",
    [
        {"annotated": False},
        {"expected": True, "annotated": False},
        {"present": True},
        {"low": 0.1, "high": 0.6},
        {"key": "0001"},
    ],
)
def test_filters_keep_what_a_loop_keeps(made, number, order, asked):
    _, data, index = made
    query = Query(order=order, number=number, **asked)
    flags = {"annotated": ANNOTATED, "expected": EXPECTED, "present": PRESENT}

    def wanted(pair):
        return (
            all(bool(pair["flags"] & flags[name]) == asked[name] for name in asked if name in flags)
            and asked.get("low", 0) <= half(pair["score"]) <= asked.get("high", 1)
            and asked.get("key", "") in data.index.key(int(pair["row"]))
        )

    everything = listed(index, Query(order=order, number=number), data.index)
    kept = [(int(pair["row"]), int(pair["class"])) for pair in everything if wanted(pair)]
    found = listed(index, query, data.index)
    assert [(int(pair["row"]), int(pair["class"])) for pair in found] == kept
    if number is None:
        assert len(everything) == data.index.num_samples


def test_index_of_many_samples_keeps_the_highest_classes_and_all_that_is_named(runs, tmp_path, monkeypatch):
    monkeypatch.setattr(index_building, "ALL_PAIRS", 0)
    monkeypatch.setattr(index_building, "KEPT", 3)
    monkeypatch.setattr(index_building, "PART", 7)  # so that pairs are sorted in many parts
    store, data = opened(runs / "dense")
    index = build_index(tmp_path, store, data)
    wanted = reference(store, data)
    assert not index.complete
    kept = {(int(pair["row"]), int(pair["class"])) for pair in everything(index)}
    for row in data.index.ids().tolist():
        by_score = sorted(range(store.spec.num_classes), key=lambda c: (-wanted[row, c][0], c))
        named = {c for c in by_score if wanted[row, c][3] & (ANNOTATED | EXPECTED | PRESENT)}
        assert {c for one, c in kept if one == row} == {*by_score[:3], *named}
    assert_pairs(everything(index), wanted)
    for number in range(store.spec.num_classes):
        own = index.of_class(number)
        assert set(own["class"]) <= {number}
        assert (np.diff([half(bits) for bits in own["score"]]) <= 0).all()


def test_classes_are_counted(made):
    store, data, index = made
    wanted, counts = reference(store, data), index.classes
    for number in range(store.spec.num_classes):
        flags = [one[3] for (_, c), one in wanted.items() if c == number]
        mined = [one for one in flags if one & EXPECTED and not one & ANNOTATED]
        assert counts.annotated[number] == sum(bool(one & ANNOTATED) for one in flags)
        assert counts.expected[number] == sum(bool(one & EXPECTED) for one in flags)
        assert counts.mined[number] == len(mined)
        assert counts.right[number] == sum(bool(one & PRESENT) for one in mined)
        assert counts.missing[number] == sum(bool(one & PRESENT) and not one & ANNOTATED for one in flags)
        scores = [one[0] for (_, c), one in wanted.items() if c == number]
        np.testing.assert_array_equal(
            counts.histogram[number], np.histogram(np.array(scores, np.float32), 20, (0, 1))[0]
        )
    together = {}
    for row in data.index.ids().tolist():
        flags = [wanted[row, c][3] for c in range(store.spec.num_classes)]
        for a, one in enumerate(flags):
            for m, other in enumerate(flags):
                if one & ANNOTATED and other & EXPECTED and not other & ANNOTATED:
                    together[a, m] = together.get((a, m), 0) + 1
    assert {(int(a), int(m)): int(n) for a, m, n in counts.together} == together


@pytest.mark.parametrize("number", [None, 4])
def test_disagreement_of_two_runs_is_their_largest_difference(runs, tmp_path, number):
    (one, data), (other, _) = opened(runs / "dense"), opened(runs / "weak")
    index, its = build_index(tmp_path / "a", one, data), build_index(tmp_path / "b", other, data)
    pairs = np.array(disagreement(one, other, index, "b"))
    found = listed(index, Query(order="against", number=number), data.index, Against(index=its, pairs=pairs))
    mine, theirs = (store.read(data.index.ids()).scores.astype(np.float64) for store in (one, other))
    apart = abs(mine - theirs)
    place = {row: n for n, row in enumerate(data.index.ids().tolist())}
    values = [half(pair["change"]) for pair in found]
    largest = apart.max(axis=1) if number is None else apart[:, number]
    np.testing.assert_allclose(values, sorted(largest, reverse=True), atol=1e-3)
    for pair, value in zip(found, values, strict=True):
        assert apart[place[int(pair["row"])], pair["class"]] == pytest.approx(value, abs=1e-3)
    # Made once: the second time it is read.
    assert np.array_equal(disagreement(one, other, index, "b"), pairs)
    file = index.folder / "against-b.npy"
    damaged = bytearray(file.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    file.write_bytes(damaged)
    assert np.array_equal(disagreement(one, other, index, "b"), pairs), "made again"


@pytest.mark.parametrize("block", [2**22, 5, 1])
def test_text_is_found_inside_keys_only(index, monkeypatch, block):
    monkeypatch.setattr(score_index, "BLOCK", block)
    for text in ("train_00001", "9", "_", "train_000029", "9train", "nothing"):
        wanted = [row for row in index.ids().tolist() if text in index.key(row)]
        assert rows_with(text, index).tolist() == wanted


def test_index_of_another_state_is_another_one_and_old_ones_go(run, index, tmp_path):
    store, data = opened(run)
    first = build_index(tmp_path, store, data)
    assert open_index(tmp_path, store).folder == first.folder
    foreign = tmp_path / "mine.txt"
    foreign.write_text("mine")
    random = np.random.default_rng(5)
    for epoch in (3, 4, 5):
        with HeatmapStore.open(run / "store", annotations=data.annotations, mode="w", run="more") as writer:
            learn(writer, index, epoch, 1.0, random)
            writer.drop_snapshots(keep=[writer.snapshot.id - 1])
        store, _ = opened(run)
        assert open_index(tmp_path, store) is None
        build_index(tmp_path, store, data)
    assert len(list(tmp_path.glob("snapshot-*"))) == 2
    assert not first.folder.exists()
    assert foreign.read_text() == "mine"


def test_interrupted_build_leaves_nothing_that_is_taken_for_an_index(run, tmp_path, monkeypatch):
    store, data = opened(run)
    cache = tmp_path / "cache"

    def fail(self, found):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(index_building._Pass, "add", fail)
        with pytest.raises(KeyboardInterrupt):
            build_index(cache, store, data)
    assert open_index(cache, store) is None
    assert not list(cache.iterdir())
    # A build that was killed leaves its folder; it goes a day later.
    left = cache / f".{index_name(store)}.0123"
    left.mkdir()
    assert build_index(cache, store, data).snapshot == store.snapshot.id
    assert left.exists()
    os.utime(left, (0, 0))
    build_index(cache, store, data)
    assert not left.exists()


def test_builds_at_once_make_one_whole_index(run, tmp_path, monkeypatch):
    store, data = opened(run)
    rename, together = index_building._rename, threading.Barrier(4)

    def rename_together(unfinished, whole):
        together.wait(30)
        rename(unfinished, whole)

    monkeypatch.setattr(index_building, "_rename", rename_together)
    with ThreadPoolExecutor(4) as pool:
        for cache in (tmp_path / str(number) for number in range(8)):
            made = list(pool.map(lambda _, cache=cache: build_index(cache, store, data), range(4)))
            assert all(one.complete for one in made)
            assert len(list(cache.iterdir())) == 1


def test_an_older_snapshot_that_is_dropped_in_mid_build_is_not_compared_with(run, tmp_path, monkeypatch):
    store, data = opened(run)
    before = snapshot_before(store)
    change, dropped = index_building._Pass._change, []

    def drop_first(self, shard, scores):
        if not dropped:
            dropped.append(shard)
            SnapshotLog(store.backend).drop(before.id)
            raise ChunkCorrupt("a chunk of the older snapshot is missing")
        return change(self, shard, scores)

    monkeypatch.setattr(index_building._Pass, "_change", drop_first)
    made = build_index(tmp_path / "cache", store, data)
    assert made.complete
    assert made.before != before.id


def test_damaged_index_is_made_again(run, tmp_path):
    store, data = opened(run)
    folder = build_index(tmp_path / "cache", store, data).folder
    shutil.copytree(folder, tmp_path / "whole")
    for file in sorted((tmp_path / "whole").iterdir()):
        flipped = bytearray(file.read_bytes())
        flipped[len(flipped) // 2] ^= 1
        for content in (b"", b"\0" * 30, b"{}", bytes(flipped), None):
            shutil.copytree(tmp_path / "whole", folder, dirs_exist_ok=True)
            assert open_index(tmp_path / "cache", store) is not None
            file_in_use = folder / file.name
            file_in_use.unlink() if content is None else file_in_use.write_bytes(content)
            assert open_index(tmp_path / "cache", store) is None, (file.name, content)
    assert build_index(tmp_path / "cache", store, data).complete


def test_store_of_scores_alone_has_an_index(index, tmp_path):
    make_store(tmp_path / "store", index, layout="scores")
    store = HeatmapStore.open(tmp_path / "store", annotations=index.annotations())
    _, data = opened_bare(tmp_path / "store", index)
    found = build_index(tmp_path / "cache", store, data)
    assert not found.heatmaps
    assert (everything(found)["peak"] == 0).all()


def opened_bare(place, index):
    source = DataFlags(shards=[index.urls[0].replace("000000", "*")])
    spec = open_store(str(place), None, StorageFlags()).spec
    return None, source.need("test", str(place), spec)


def test_run_is_followed_to_its_next_snapshot(run, index):
    shown = OpenRun(str(run), Places(source=DataFlags(), storage=StorageFlags(), cache=None))
    shown.follow()
    first = shown.index.snapshot
    with HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w", run="more") as writer:
        learn(writer, index, 3, 1.0, np.random.default_rng(5))
    shown.follow()
    assert shown.store.snapshot.id > first
    assert shown.index.snapshot == shown.store.snapshot.id or shown.index.snapshot == first
    shown.update(now=True)
    assert shown.index.snapshot == shown.store.snapshot.id
    pinned = OpenRun(f"{run}@{first}", Places(source=DataFlags(), storage=StorageFlags(), cache=None))
    pinned.update(now=True)
    assert pinned.index.snapshot == first


def test_prepare_makes_the_index_and_exits(run):
    answer = bigscl("view", run, "--prepare")
    assert answer.code == 0, answer.err
    assert "is indexed" in answer.out
    # Other commands of this test session may have left indexes of the run that this one is a copy of.
    folder = max((run / "view").iterdir(), key=lambda each: each.stat().st_mtime)
    assert json.loads((folder / "index.json").read_text())["complete"]


# Single rows


@pytest.mark.parametrize("layout", [{}, {"top": 4}, {"codec": "zstd"}, {"checksum": False}])
def test_peek_gives_the_rows_that_a_whole_read_gives(index, tmp_path, layout):
    make_store(tmp_path / "store", index, **layout)
    store = HeatmapStore.open(tmp_path / "store", annotations=index.annotations())
    ids = np.random.default_rng(0).permutation(index.ids())
    for wanted in (ids, ids[:1], ids[:0], np.repeat(ids[:2], 2)):
        mine, its = store.peek(wanted), store.read_without_initial_value(wanted)
        for name, array in its.items():
            assert np.array_equal(array, mine[name]), name


def test_peek_of_rows_that_were_never_visited_gives_initial_values(index, tmp_path):
    HeatmapStore.create(tmp_path / "store", index.annotations(), heatmap_size=12)
    store = HeatmapStore.open(tmp_path / "store", annotations=index.annotations())
    rows = store.peek(index.ids()[:5])
    assert np.array_equal(rows.scores == 1, index.labels_of(index.ids()[:5]) == 1)


@pytest.mark.parametrize("damage", ["missing", "short"])
def test_peek_of_a_damaged_chunk_names_it(run, damage):
    store, data = opened(run)
    chunk = next(iter((run / "store").glob(f"{store.snapshot.group}/scores/c.{store.snapshot.slots[0]}.0.*")))
    if damage == "missing":
        chunk.unlink()
    else:
        chunk.write_bytes(chunk.read_bytes()[:3])
    with pytest.raises(ChunkCorrupt, match="scores: shard 0"):
        store.peek(data.index.ids()[:1])


def test_peek_after_the_snapshot_was_dropped_says_so(run, index):
    store, data = opened(run)
    shutil.rmtree(run / "store" / "snapshots")
    with pytest.raises(Exception, match="snapshot"):
        store.peek(data.index.ids()[:2])
