"""Prefetch and writeback: order, bounds, errors, and threads that end."""

import sys
import threading
import time
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from bigscl.store import HeatmapStore, Prefetcher, Rows, ShardCache, StoreError, Writeback
from bigscl.store.errors import BadValues
from tests.test_store.conftest import all_ids, make_annotations, random_update


def our_threads():
    return {thread.name for thread in threading.enumerate() if thread.name.startswith("store-")}


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    # The lease's heartbeat belongs to the open store, and ends with it.
    assert our_threads() <= {"store-lease"}


def run_epoch(store, epoch, batches, values, cache=None):
    """One epoch the way the trainer does it; gives back what each batch was paired with."""
    paired = []
    with cache or ShardCache(store, epoch) as cache, Prefetcher(cache) as prefetcher:
        with Writeback(cache) as writeback:
            for ids, rows in prefetcher.pair(batches, lambda ids: ids):
                paired.append(rows)
                writeback.put(ids, values.take(ids))
            writeback.drain()
    return paired


def shuffled_batches(annotations, size, seed=0):
    order = np.random.default_rng(seed).permutation(all_ids(annotations))
    return np.array_split(order, max(1, len(order) // size))


def test_an_epoch_reads_last_epochs_rows_and_leaves_its_own(store, annotations):
    ids = all_ids(annotations)
    before = store.read(np.arange(5))
    for epoch in range(3):
        values = random_update(store, store.spec.num_rows, seed=epoch)
        batches = shuffled_batches(annotations, 4, seed=epoch)
        last = store.read(ids)
        paired = run_epoch(store, epoch, batches, values)
        lookup = {n: place for place, n in enumerate(ids)}
        for batch, rows in zip(batches, paired, strict=True):
            np.testing.assert_array_equal(rows.heatmaps, last.heatmaps[[lookup[n] for n in batch]])
        store.commit(epoch=epoch)
        store.drop_snapshots()
        np.testing.assert_array_equal(store.read(ids).heatmaps, values.heatmaps[ids])
        assert (store.last_epochs()[ids] == epoch).all()
    assert (before["last_epoch"] == -1).all()


def test_a_commit_in_mid_epoch_keeps_what_is_in_and_the_rest_follows(store, annotations):
    values = random_update(store, store.spec.num_rows, seed=3)
    batches = shuffled_batches(annotations, 3)
    with ShardCache(store, 0) as cache, Prefetcher(cache) as prefetcher:
        with Writeback(cache) as writeback:
            for step, (ids, _) in enumerate(prefetcher.pair(batches, lambda ids: ids)):
                writeback.put(ids, values.take(ids))
                if step == 1:
                    writeback.drain()
                    middle = store.commit(epoch=0, step=step)
            writeback.drain()
            store.commit(epoch=0, step=step)
    done = np.concatenate(batches[:2])
    halfway = HeatmapStore.open(store.backend.url, annotations=annotations, snapshot=middle.id)
    assert sorted(np.flatnonzero(halfway.last_epochs() == 0)) == sorted(done)
    np.testing.assert_array_equal(halfway.read(done).scores, values.scores[done])
    ids = all_ids(annotations)
    np.testing.assert_array_equal(store.read(ids).scores, values.scores[ids])


def test_a_shard_is_written_once_and_let_go_when_its_last_sample_is_in(store, annotations, monkeypatch):
    writes = []
    save = store.save_shard
    monkeypatch.setattr(store, "save_shard", lambda shard, *rest: (writes.append(shard), save(shard, *rest)))
    values = random_update(store, store.spec.num_rows, seed=1)
    batches = [np.arange(s * 5, s * 5 + n) for s, n in enumerate(annotations.shard_sizes)]
    cache = ShardCache(store, 0)
    run_epoch(store, 0, batches, values, cache)
    assert sorted(writes) == [0, 1, 2]


def test_skipped_samples_do_not_keep_a_shard_resident(store, annotations):
    values = random_update(store, store.spec.num_rows, seed=1)
    with ShardCache(store, 0) as cache:
        cache.gather(np.arange(4))
        cache.scatter(np.arange(4), values.take(slice(4)))
        cache.flush()
        assert len(cache._shards) == 1, "the fifth sample is still expected"
        cache.skip(np.array([4]))
        cache.flush()
        deadline = time.monotonic() + 10
        while cache._shards and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not cache._shards


def test_ram_is_bounded_by_the_limit_and_nothing_is_lost_by_it(tmp_path):
    annotations = make_annotations(shard_sizes=(4,) * 12)
    HeatmapStore.create(tmp_path / "store", annotations, heatmap_size=4)
    with HeatmapStore.open(tmp_path / "store", annotations=annotations, mode="w") as store:
        cache = ShardCache(store, 0, limit_bytes=0)
        cache._limit_shards = 3
        values = random_update(store, store.spec.num_rows, seed=1)
        peaks = []
        with cache:
            for ids in np.split(np.random.default_rng(0).permutation(48), 48):
                cache.gather(ids)
                peaks.append(len(cache._shards))
                cache.scatter(ids, values.take(ids))
            cache.flush()
        store.commit(epoch=0)
        assert max(peaks) <= 3
        np.testing.assert_array_equal(store.read(np.arange(48)).heatmaps, values.heatmaps)


@pytest.mark.parametrize("bad", [np.nan, -0.5, 1.001, np.inf])
def test_bad_values_stop_the_run_with_the_samples_id_and_store_nothing(store, annotations, bad):
    ids = np.array([2, 7])
    values = random_update(store, 2, seed=0)
    values.heatmaps[1, 3, 0, 0] = bad
    with ShardCache(store, 0) as cache, Writeback(cache) as writeback:
        writeback.put(ids, values)
        with pytest.raises(BadValues, match=r"heatmaps of sample 7: found"):
            writeback.drain()
        with pytest.raises(BadValues):
            writeback.put(ids, values)
    assert (store.last_epochs() == -1).all()


def test_an_update_that_does_not_fit_the_layout_is_refused(store):
    values = random_update(store, 2, seed=0)
    with ShardCache(store, 0) as cache:
        with pytest.raises(
            BadValues, match=r"expected \['cell_visits', 'heatmaps', 'sample_visits', 'scores'\]"
        ):
            cache.scatter(np.array([0, 1]), Rows(scores=values.scores, sample_visits=values["sample_visits"]))
        with pytest.raises(BadValues, match="got float32"):
            cache.scatter(np.array([0, 1]), values.replace(scores=values.scores.astype(np.float32)))


def test_a_failing_loader_stops_the_step_with_its_own_error(store):
    def batches():
        yield np.array([0])
        raise RuntimeError("worker 3 was killed")

    with ShardCache(store, 0) as cache, Prefetcher(cache) as prefetcher:
        with pytest.raises(RuntimeError, match="worker 3 was killed"):
            list(prefetcher.pair(batches(), lambda ids: ids))


def test_a_failing_write_stops_the_next_step_with_its_own_error(store, annotations, monkeypatch):
    def save(*arguments):
        raise StoreError("disk on fire")

    monkeypatch.setattr(store, "save_shard", save)
    values = random_update(store, store.spec.num_rows, seed=1)
    with pytest.raises(StoreError, match="disk on fire"):
        run_epoch(store, 0, shuffled_batches(annotations, 2), values)


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_threads_end_when_the_step_raises(store, annotations, error):
    values = random_update(store, store.spec.num_rows, seed=1)

    def interrupted():
        with ShardCache(store, 0) as cache, Prefetcher(cache, depth=1) as prefetcher:
            with Writeback(cache, depth=1) as writeback:
                for ids, _ in prefetcher.pair(shuffled_batches(annotations, 1), lambda ids: ids):
                    writeback.put(ids, values.take(ids))
                    raise error

    with pytest.raises(error):
        interrupted()
    assert our_threads() <= {"store-lease"}


def interrupt_at(place):
    """Ctrl-C in this thread at one place of the code that waits, counted in lines and returns."""
    left = count(place, -1)

    def trace(frame, event, _):
        if Path(frame.f_code.co_filename).stem not in ("writeback", "waiting", "queue", "threading"):
            return None
        if event in ("line", "return") and next(left) == 0:
            raise KeyboardInterrupt
        return trace

    sys.settrace(trace)


def test_writeback_ends_wherever_an_update_is_interrupted(store):
    """Also between taking a lock and noting that it was taken, where queue.Queue would stay locked."""
    values = random_update(store, 1, seed=0)
    interrupted, place = True, 0
    while interrupted:
        with ShardCache(store, 0) as cache:
            writeback = Writeback(cache)
            interrupt_at(place)
            try:
                writeback.put(np.array([0]), values)
                interrupted = False
            except KeyboardInterrupt:
                place += 1
            finally:
                sys.settrace(None)
            closing = threading.Thread(target=writeback.close, daemon=True)
            closing.start()
            closing.join(20)
            assert not closing.is_alive(), f"interrupted at place {place}"
    assert place > 5


def test_updates_after_the_end_of_the_thread_are_refused(store):
    values = random_update(store, 1, seed=0)
    with ShardCache(store, 0) as cache:
        writeback = Writeback(cache, depth=1)
        writeback.close()
        with pytest.raises(RuntimeError, match="thread has ended"):
            writeback.put(np.array([0]), values)
        with pytest.raises(RuntimeError, match="thread has ended"):
            writeback.drain()


def test_bytes_are_taken_only_when_ready(store):
    values = random_update(store, 1, seed=1)
    late = np.zeros_like(values.scores)
    copied = threading.Event()
    with ShardCache(store, 0) as cache, Writeback(cache) as writeback:
        writeback.put(np.array([0]), values.replace(scores=late), ready=lambda: copied.wait(10))
        late[:] = values.scores
        copied.set()
        writeback.drain()
    np.testing.assert_array_equal(store.read([0]).scores, values.scores)


def test_waits_are_counted_under_the_name_of_what_was_waited_for(store, annotations, monkeypatch):
    def slow_batches():
        for ids in (np.array([0]), np.array([5])):
            time.sleep(0.15)
            yield ids

    with ShardCache(store, 0) as cache, Prefetcher(cache) as prefetcher:
        list(prefetcher.pair(slow_batches(), lambda ids: ids))
        assert prefetcher.waits.data > max(0.2, prefetcher.waits.heatmaps)

    load = store.load_shard
    monkeypatch.setattr(store, "load_shard", lambda *given: (time.sleep(0.15), load(*given))[1])
    with ShardCache(store, 0) as cache, Prefetcher(cache) as prefetcher:
        list(prefetcher.pair([np.array([0]), np.array([5])], lambda ids: ids))
        assert prefetcher.waits.heatmaps > max(0.2, prefetcher.waits.data)

    values = random_update(store, 1, seed=0)
    with ShardCache(store, 0) as cache, Writeback(cache, depth=1) as writeback:
        for _ in range(4):
            writeback.put(np.array([0]), values, ready=lambda: time.sleep(0.1))
        assert writeback.wait_seconds > 0.1
