import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigscl.data.epoch_plan import Plan, batch_lengths, evaluation_plan, training_plan


@st.composite
def topologies(draw):
    """Shards of uneven sizes, and the ranks and workers that share them."""
    num_shards = draw(st.integers(1, 40))
    size = draw(st.sampled_from([3, 100, 5000]))
    sizes = np.array(draw(st.lists(st.integers(1, size), min_size=num_shards, max_size=num_shards)))
    return {
        "shard_sizes": sizes,
        "rows_per_shard": int(sizes.max()) + draw(st.integers(0, 3)),
        "batch_size": draw(st.sampled_from([1, 2, 3, 7, 64, 1000])) if sizes.sum() < 20000 else 64,
        "world_size": draw(st.integers(1, 16)),
        "workers": draw(st.integers(0, 8)),
    }


def all_ids(topology):
    rows = topology["rows_per_shard"]
    return np.concatenate([shard * rows + np.arange(n) for shard, n in enumerate(topology["shard_sizes"])])


def yielded(plan: Plan) -> list[list[np.ndarray]]:
    return [list(plan.batches(rank)) for rank in range(plan.world_size)]


def same(left, right) -> bool:
    return len(left) == len(right) and all(np.array_equal(a, b) for a, b in zip(left, right, strict=True))


@given(topologies(), st.integers(0, 5), st.integers(0, 2**40))
@settings(max_examples=60, deadline=None)
def test_every_sample_is_in_exactly_one_batch_of_one_rank(topology, epoch, seed):
    plan = training_plan(**topology, seed=seed, epoch=epoch)
    batches = yielded(plan)
    ids = np.concatenate([ids for rank in batches for ids in rank])
    assert np.array_equal(np.sort(ids), all_ids(topology))


@given(topologies(), st.integers(0, 5))
@settings(max_examples=50, deadline=None)
def test_counts_agree_with_what_the_ranks_yield(topology, epoch):
    plan = training_plan(**topology, seed=1, epoch=epoch)
    batches = yielded(plan)
    for rank, mine in enumerate(batches):
        assert len(mine) == plan.num_batches(rank)
        assert sum(map(len, mine)) == plan.num_samples(rank)
        assert all(0 < len(ids) <= max(topology["batch_size"], 3) for ids in mine)
    assert plan.num_steps == max(map(len, batches))
    per_rank = [plan.num_samples(rank) for rank in range(plan.world_size)]
    alone = topology["batch_size"] > 1 and sum(per_rank) < 2 * plan.world_size
    assert max(per_rank) - min(per_rank) <= (3 if alone else 1)


@given(topologies())
@settings(max_examples=30, deadline=None)
def test_a_shard_is_written_by_one_rank_that_trains_samples_of_it(topology):
    plan = training_plan(**topology, seed=3, epoch=1)
    written = []
    for rank, streams in enumerate(plan.streams):
        own = set()
        for stream in streams:
            of_ids = set((stream.ids // topology["rows_per_shard"]).tolist())
            assert of_ids == set(stream.shards.tolist())
            assert len(of_ids) == len(stream.shards)
            own |= of_ids
        assert plan.borrowed(rank) <= own
        written += own - plan.borrowed(rank)
    assert sorted(written) == list(range(len(topology["shard_sizes"])))


def test_a_rank_borrows_at_most_its_first_shard():
    plan = training_plan(np.full(1282, 1000), 1000, seed=3, epoch=1, batch_size=64, world_size=128)
    for rank in range(128):
        assert plan.borrowed(rank) <= {plan.streams[rank][0].shards[0]}
    assert not plan.borrowed(0)


@given(topologies())
@settings(max_examples=50, deadline=None)
def test_a_rank_has_no_more_batches_than_its_samples_fill(topology):
    plan = training_plan(**topology, seed=3, epoch=1)
    for rank in range(plan.world_size):
        filled = batch_lengths(plan.num_samples(rank), topology["batch_size"])
        assert [len(ids) for ids in plan.batches(rank)] == filled
        # All workers of a rank decode until its last batches.
        streams = [len(batch_lengths(len(stream.ids), plan.batch_size)) for stream in plan.streams[rank]]
        assert max(streams) - min(streams) <= 1


@given(topologies())
@settings(max_examples=50, deadline=None)
def test_an_epoch_has_no_more_steps_than_full_global_batches(topology):
    plan = training_plan(**topology, seed=3, epoch=1)
    num_samples, together = topology["shard_sizes"].sum(), plan.world_size * plan.batch_size
    # So few samples that each rank would have one: some have two or three, and the others none.
    assert plan.num_steps <= -(-num_samples // together) + (num_samples < 2 * plan.world_size)


@given(topologies())
@settings(max_examples=50, deadline=None)
def test_a_shard_that_two_workers_read_is_read_by_both_at_the_same_time(topology):
    """One of three workers reads nothing else, so that it has the shard open all the time."""
    plan = training_plan(**topology, seed=3, epoch=1)
    for streams in plan.streams:
        shards = [stream.shards.tolist() for stream in streams if len(stream.ids)]
        for shard in {shard for own in shards for shard in own}:
            readers = [own for own in shards if shard in own]
            if len(readers) == 2:
                first = [own[0] == shard for own in readers]
                last = [own[-1] == shard for own in readers]
                assert all(first) or all(last)


@given(topologies(), st.integers(1, 300))
@settings(max_examples=30, deadline=None)
def test_a_reader_holds_at_most_the_buffer(topology, buffer):
    """A slow reader: it reads the shards from front to back and keeps what is not due yet."""
    topology["shard_sizes"] = np.minimum(topology["shard_sizes"], 200)
    plan = training_plan(**topology, seed=3, epoch=1, shuffle_buffer=buffer)
    for stream in (stream for rank in plan.streams for stream in rank):
        own = set(stream.ids.tolist())
        source = iter(
            sample
            for shard in stream.shards.tolist()
            for position in range(topology["shard_sizes"][shard])
            if (sample := shard * topology["rows_per_shard"] + position) in own
        )
        held = set()
        for sample in stream.ids.tolist():
            while sample not in held:
                held.add(next(source))
            assert len(held) <= buffer + 1
            held.remove(sample)


@given(topologies(), st.integers(0, 200))
@settings(max_examples=60, deadline=None)
def test_interrupted_epoch_goes_on_with_the_same_batches_in_the_same_order(topology, steps):
    topology["shard_sizes"] = np.minimum(topology["shard_sizes"], 300)
    whole = yielded(training_plan(**topology, seed=5, epoch=2))
    visited = np.zeros(len(topology["shard_sizes"]) * topology["rows_per_shard"], dtype=bool)
    for batches in whole:
        for ids in batches[:steps]:
            visited[ids] = True
    rest = yielded(training_plan(**topology, seed=5, epoch=2, visited=visited))
    assert all(same(left, batches[steps:]) for left, batches in zip(rest, whole, strict=True))


@given(topologies(), topologies(), st.integers(1, 50))
@settings(max_examples=40, deadline=None)
def test_after_a_change_of_topology_the_rest_comes_exactly_once(topology, other, steps):
    other |= {name: topology[name] for name in ("shard_sizes", "rows_per_shard")}
    visited = np.zeros(len(topology["shard_sizes"]) * topology["rows_per_shard"], dtype=bool)
    plan = training_plan(**topology, seed=5, epoch=2)
    for rank in range(plan.world_size):
        for _, ids in zip(range(steps), plan.batches(rank), strict=False):
            visited[ids] = True
    rest = [
        ids
        for batches in yielded(training_plan(**other, seed=5, epoch=2, visited=visited))
        for ids in batches
    ]
    left = all_ids(topology)
    left = left[~visited[left]]
    assert np.array_equal(np.sort(np.concatenate([np.empty(0, int), *rest])), left)


def test_epochs_and_seeds_give_other_orders_and_equal_ones_the_same():
    def order(seed, epoch):
        plan = training_plan(np.full(20, 50), 50, seed=seed, epoch=epoch, batch_size=10, world_size=2)
        return np.concatenate(list(plan.batches(0)))

    assert np.array_equal(order(1, 2), order(1, 2))
    for other in (order(1, 3), order(2, 2)):
        assert set(other // 50) != set(order(1, 2) // 50)


def test_plans_are_the_same_on_every_machine_and_version():
    """A run can be resumed elsewhere: these numbers were written down, not computed here."""
    plan = training_plan(
        np.array([4, 3, 5]), 5, seed=7, epoch=3, batch_size=3, world_size=2, workers=1, shuffle_buffer=3
    )
    found = [[ids.tolist() for ids in batches] for batches in yielded(plan)]
    assert found == [[[10, 12, 11], [13, 14, 0]], [[1, 2, 3], [5, 6, 7]]]
    assert plan.writers.tolist() == [0, 1, 0]


@given(topologies(), st.integers(0, 3))
@settings(max_examples=80, deadline=None)
def test_no_batch_has_a_single_sample_if_it_can_be_helped(topology, epoch):
    batches = [ids for rank in yielded(training_plan(**topology, seed=4, epoch=epoch)) for ids in rank]
    if topology["batch_size"] > 1 and topology["shard_sizes"].sum() > 1:
        assert min(map(len, batches)) >= 2


@given(st.integers(0, 200), st.integers(1, 20))
def test_batches_are_full_but_for_the_last_two(num_samples, batch_size):
    lengths = batch_lengths(num_samples, batch_size)
    assert sum(lengths) == num_samples
    assert all(length == batch_size for length in lengths[:-2])
    for done in range(len(lengths)):
        assert batch_lengths(sum(lengths[done:]), batch_size) == lengths[done:]
    if num_samples % batch_size != 1 or batch_size == 1:
        plain = [min(batch_size, num_samples - first) for first in range(0, num_samples, batch_size)]
        assert lengths == plain


def test_the_buffer_mixes_samples_over_its_length():
    ids = (
        training_plan(np.array([5000]), 5000, seed=1, epoch=1, batch_size=64, shuffle_buffer=500)
        .streams[0][0]
        .ids
    )
    moved = np.abs(ids - np.arange(5000))
    assert moved.max() < 500
    assert moved.mean() > 100


def test_fewer_shards_than_ranks_leave_no_rank_idle():
    plan = training_plan(np.array([5, 3]), 5, seed=1, epoch=1, batch_size=2, world_size=4, workers=2)
    assert [plan.num_samples(rank) for rank in range(4)] == [2, 2, 2, 2]
    assert plan.num_steps == 1


def test_fewer_than_two_samples_for_each_rank_leave_ranks_idle():
    plan = training_plan(np.array([5, 2]), 5, seed=1, epoch=1, batch_size=2, world_size=4)
    assert [plan.num_samples(rank) for rank in range(4)] == [3, 2, 2, 0]


@given(topologies())
@settings(max_examples=40, deadline=None)
def test_evaluation_has_every_sample_once_in_even_parts(topology):
    plan = evaluation_plan(**topology)
    ids = np.concatenate([ids for rank in yielded(plan) for ids in rank])
    assert np.array_equal(np.sort(ids), all_ids(topology))
    lengths = [len(stream.ids) for rank in plan.streams for stream in rank]
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    "wrong", [{"batch_size": 0}, {"world_size": 0}, {"workers": -1}, {"shuffle_buffer": 0}]
)
def test_impossible_numbers_are_refused_by_name(wrong):
    arguments = {"seed": 0, "epoch": 0, "batch_size": 2} | wrong
    with pytest.raises(ValueError, match=next(iter(wrong))):
        training_plan(np.array([5]), 5, **arguments)


def test_an_imagenet_epoch_is_planned_in_about_a_second():
    started = time.perf_counter()
    training_plan(np.full(1281, 1000), 1000, seed=1, epoch=1, batch_size=64, world_size=8, workers=8)
    # 0.1 s on a quiet core.
    assert time.perf_counter() - started < 3
