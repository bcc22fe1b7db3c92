"""The memory as an own loop uses it: recall, learn, the end of an epoch, saving and resuming."""

import numpy as np
import pytest
import torch

from bigscl.config import ConfigError, StoreConfig
from bigscl.memory.epoch_io import divide_shards
from bigscl.memory.lookup import RepeatedSample, SampleViews
from bigscl.memory.memory import Memory
from bigscl.store import HeatmapStore, StoreError
from tests.test_store.conftest import all_ids, assert_same_rows, make_annotations
from tests.test_store.ranks import run_threads

SIDE, K = 3, 1.5
ANNOTATIONS = make_annotations()  # shards of 5, 3 and 4 samples, 7 classes
IDS = all_ids(ANNOTATIONS)


def open_memory(path, **options):
    settings = {"url": str(path), "history_samples": 0, **options.pop("settings", {})}
    options = {"heatmap_size": 2 * SIDE, "positives_per_image": K, **options}
    return Memory(ANNOTATIONS, StoreConfig(**settings), **options)


def batches_of(ids, size=4):
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def views_of(ids, epoch):
    """Another crop and flip for each sample and epoch."""
    rng = np.random.default_rng(epoch)
    rows = rng.random((100, 5), np.float32)
    rows[:, 2:4] = 0.4 + 0.6 * rows[:, 2:4]
    rows[:, :2] *= 1 - rows[:, 2:4]
    rows[:, 4] = rows[:, 4] > 0.5
    return torch.from_numpy(rows)[torch.from_numpy(ids)]


def predict(ids, epoch):
    """(logits, maps) that depend on the samples and the epoch alone."""
    rng = np.random.default_rng(1000 + epoch)
    maps = torch.from_numpy(rng.random((100, 7, SIDE, SIDE), np.float32))[torch.from_numpy(ids)]
    return torch.logit(maps.mean((2, 3))), maps


def learn(memory, stored):
    logits, maps = predict(stored.rows, memory.epoch)
    memory.update(stored, logits=logits, maps=maps)


def train_epoch(memory, ids=IDS, *, ahead=True):
    batches = [SampleViews(each, views_of(each, memory.epoch)) for each in batches_of(ids)]
    pairs = (
        memory.prefetch(batches)
        if ahead
        else ((sample_views, memory.lookup(*sample_views)) for sample_views in batches)
    )
    found = []
    for _, stored in pairs:
        found.append(stored)
        learn(memory, stored)
    return found


def rows_at(path, snapshot=None):
    return HeatmapStore.open(path, annotations=ANNOTATIONS, snapshot=snapshot).read(IDS)


@pytest.fixture
def memory(tmp_path):
    with open_memory(tmp_path / "store") as opened:
        yield opened


def test_an_epoch_recalls_what_the_epoch_before_has_learnt(memory):
    """Whole images and the same probability in every cell, so that the averages are known."""
    half = torch.full((4, 7), 0.5)
    for _ in range(2):
        found = []
        for ids in batches_of(IDS):
            found.append(memory.lookup(ids))
            maps = half[:, :, None, None].expand(-1, -1, SIDE, SIDE)
            memory.update(found[-1], logits=torch.logit(half), maps=maps)
        if memory.epoch == 0:
            first = found
        memory.end_epoch()
    for before, after in zip(first, found, strict=True):
        np.testing.assert_allclose(after.scores, 0.8 * before.scores.float() + 0.1, atol=1e-3)
        np.testing.assert_allclose(after.heatmaps, 0.8 * before.heatmaps.float() + 0.1, atol=1e-3)
        assert (before.arrays["sample_visits"] == 0).all()
        assert (after.arrays["sample_visits"] == 1).all()


def test_reading_ahead_changes_no_bit(tmp_path):
    for ahead in (True, False):
        with open_memory(tmp_path / f"{ahead}") as memory:
            for _ in range(3):
                train_epoch(memory, ahead=ahead)
                memory.end_epoch()
            cuts = memory.selection.to_json()
    assert_same_rows(rows_at(tmp_path / "True"), rows_at(tmp_path / "False"))
    with HeatmapStore.open(tmp_path / "True") as store:
        assert store.snapshot.attributes["selection"] == cuts


@pytest.mark.parametrize(
    "wrap",
    [
        lambda sample_views: {"ids": sample_views.ids.tolist(), "views": sample_views.views.numpy()},
        lambda sample_views: SampleViews(torch.from_numpy(sample_views.ids), sample_views.views.double()),
    ],
    ids=["lists in a dict", "tensors"],
)
def test_ids_and_views_may_be_lists_arrays_or_tensors(memory, wrap):
    sample_views = SampleViews(IDS[:4], views_of(IDS[:4], 0))
    ((_, found),) = memory.prefetch([wrap(sample_views)])
    expected = memory.lookup(*sample_views)
    assert torch.equal(found.views, expected.views)
    assert torch.equal(found.target(SIDE), expected.target(SIDE))


def test_a_function_says_where_other_batches_have_their_ids(memory):
    pairs = memory.prefetch([(None, IDS[:2])], sample_views=lambda batch: SampleViews(batch[1]))
    assert [stored.rows.tolist() for _, stored in pairs] == [[0, 1]]
    with pytest.raises(ValueError, match="tuple without `ids`"):
        list(memory.prefetch([(None, IDS[:2])]))


def test_the_selection_of_an_epoch_is_committed_with_it(memory):
    train_epoch(memory)
    memory.end_epoch(step=17)
    snapshot = memory.store.snapshot
    assert snapshot.attributes["selection"] == memory.selection.to_json()
    assert snapshot.attributes["next_epoch"] == memory.epoch == 1
    assert snapshot.step == 17
    expected = np.rint(K * ANNOTATIONS.counts()).astype(int)
    assert snapshot.attributes["selection"]["num_expected"] == expected.tolist()


def test_inputs_of_a_recall_have_what_an_objective_needs(memory):
    train_epoch(memory)
    memory.end_epoch()
    stored = memory.lookup(IDS, views_of(IDS, 1))
    logits, maps = predict(IDS, 1)
    inputs = stored.inputs(logits, torch.full((len(IDS), 7), -1, dtype=torch.int8), maps)
    assert inputs.target.shape == maps.shape
    assert inputs.expected.sum(0).tolist() == np.rint(K * ANNOTATIONS.counts()).astype(int).tolist()
    assert stored.inputs(logits, inputs.labels).target is None


# A sample is learnt at most once per epoch


def test_a_sample_that_was_learnt_is_refused_until_the_next_epoch(memory):
    learn(memory, memory.lookup(IDS[:4]))
    with pytest.raises(RepeatedSample, match="sample 2 comes a second time in epoch 0"):
        memory.lookup(IDS[2:6])
    with pytest.raises(RepeatedSample, match="sample 3 comes a second time"):
        list(memory.prefetch([SampleViews(IDS[3:5])]))
    assert memory.is_new(IDS[2:6]).tolist() == [False, False, True, True]
    memory.end_epoch()
    learn(memory, memory.lookup(IDS[2:6]))


def test_a_sample_that_was_recalled_twice_is_learnt_once(memory, tmp_path):
    one, two = memory.lookup(IDS[:4]), memory.lookup(IDS[2:6])
    learn(memory, one)
    with pytest.raises(RepeatedSample, match="sample 2"):
        learn(memory, two)
    memory.end_epoch()
    with open_memory(tmp_path / "once") as other:
        learn(other, other.lookup(IDS[:4]))
        other.end_epoch()
    assert_same_rows(rows_at(tmp_path / "store"), rows_at(tmp_path / "once"))


def test_a_sample_twice_in_a_batch_is_refused(memory):
    with pytest.raises(RepeatedSample, match="sample 1 is twice in one batch"):
        memory.lookup([0, 1, 1])


def test_samples_that_are_not_learnt_keep_their_rows(memory, tmp_path):
    """Never visited, looked up only, lost with an exception, announced and broken off, and skipped."""
    train_epoch(memory)
    memory.end_epoch()
    before = rows_at(tmp_path / "store")
    memory.lookup(IDS[:2])
    next(memory.prefetch([SampleViews(IDS[2:4]), SampleViews(IDS[4:6])]))
    memory.skip(IDS[6:7])
    learn(memory, memory.lookup(IDS[7:8]))
    memory.end_epoch()
    after = rows_at(tmp_path / "store")
    assert after["last_epoch"].tolist() == [0] * 7 + [1] + [0] * (len(IDS) - 8)
    kept = np.arange(len(IDS)) != 7
    assert_same_rows(after.take(kept), before.take(kept))
    assert (after.scores[7] != before.scores[7]).any()


def test_what_was_recalled_in_one_epoch_is_not_learnt_in_the_next(memory):
    stored = memory.lookup(IDS[:4])
    memory.end_epoch()
    with pytest.raises(ValueError, match="before the epoch ended"):
        learn(memory, stored)


def test_a_pass_ends_with_its_epoch(memory):
    pairs = memory.prefetch([SampleViews(ids) for ids in batches_of(IDS)])
    next(pairs)
    memory.end_epoch()
    with pytest.raises(ValueError, match="the epoch has ended"):
        next(pairs)


def test_an_error_of_the_loader_reaches_the_loop_and_costs_nothing_that_was_learnt(memory):
    def batches():
        yield SampleViews(IDS[:4])
        raise ZeroDivisionError("in somebody's loader")

    pairs = memory.prefetch(batches())
    learn(memory, next(pairs)[1])
    with pytest.raises(ZeroDivisionError, match="somebody's loader"):
        next(pairs)
    learn(memory, memory.lookup(IDS[4:8]))
    memory.end_epoch()
    assert memory.store.last_epochs()[IDS].tolist() == [0] * 8 + [-1] * 4


def test_a_plan_has_what_is_left_of_the_epoch_exactly_once(memory):
    learn(memory, memory.lookup(IDS[:4]))
    planned = np.concatenate(list(memory.plan(batch_size=3, seed=1).batches(0)))
    assert sorted(planned) == IDS[4:].tolist()


# Bad input


def test_bad_input_is_refused_in_words(memory):
    stored = memory.lookup(IDS[:4])
    logits, maps = predict(IDS[:4], 0)
    for call, words in (
        (lambda: memory.lookup([99]), "no sample 99"),
        (lambda: memory.lookup([0.5]), "whole numbers"),
        (lambda: memory.lookup([0], [[0, 0, 1, 1]]), r"views: found \[1, 4\], expected \[1, 5\]"),
        (lambda: memory.lookup([0], [[0.5, 0, 0.6, 1, 0]]), "fractions in 0 to 1"),
        (lambda: memory.lookup([0], [[0, 0, 48, 48, 0]]), "fractions in 0 to 1"),
        (lambda: memory.lookup([0], [[0, 0, 1, 1, 0.5]]), "1 where mirrored"),
        (lambda: memory.lookup([0], [[0.5, 0, 0, 1, 0]]), "fractions in 0 to 1"),
        (lambda: memory.lookup([0], [[0, 0, 1, 1, 0]], [[0.5, 0.5, 0.6, 0]]), "erased: found"),
        (lambda: memory.is_new([0.5]), "whole numbers"),
        (lambda: memory.update(stored, logits=logits[:3], maps=maps), r"logits: found \[3, 7\]"),
        (lambda: memory.update(stored, logits=logits), "maps: missing"),
        (lambda: memory.update(stored, logits=logits, maps=maps[:, :3]), r"maps: found \[4, 3, 3, 3\]"),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    # Row 8 is past the end of the second shard, which has 3 samples of 5 rows.
    with pytest.raises(ValueError, match="no sample 8"):
        memory.lookup([8])
    learn(memory, stored)


def test_logits_in_place_of_probabilities_stop_the_next_call(memory):
    stored = memory.lookup(IDS[:4])
    logits, _ = predict(IDS[:4], 0)
    memory.update(stored, logits=logits, maps=torch.full((4, 7, SIDE, SIDE), 10.0))
    with pytest.raises(ValueError, match="heatmaps of sample 0: found"):
        memory.end_epoch()


def test_a_state_is_loaded_after_values_were_refused(memory):
    state = memory.state_dict()
    memory.update(memory.lookup(IDS[:4]), logits=torch.full((4, 7), np.nan), maps=predict(IDS[:4], 0)[1])
    with pytest.raises(ValueError, match="scores of sample 0: found nan"):
        memory.commit()
    memory.load_state_dict(state)
    learn(memory, memory.lookup(IDS[:4]))
    memory.end_epoch()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"momentum": 1.5}, "momentum: 1.5"),
        ({"url": None}, "url: missing"),
        ({"kind": "none"}, "a memory needs a store"),
        ({"top": 3}, "compact_after: missing"),
        ({"slots": 2}, "slots: 2, expected at least 3"),
    ],
)
def test_bad_settings_are_refused(tmp_path, settings, words):
    with pytest.raises((ValueError, ConfigError), match=words):
        open_memory(tmp_path / "store", settings=settings)


def test_bad_arguments_are_refused(tmp_path):
    settings = StoreConfig(url=str(tmp_path / "store"))
    for arguments, options, words in (
        (("index", settings), {}, r"found str, expected Annotations\. Pass index\.annotations\(\)"),
        ((ANNOTATIONS, {"url": "x"}), {}, "settings: found dict"),
        ((ANNOTATIONS, settings), {"positives_per_image": -1.0}, "positives_per_image: found -1"),
        ((ANNOTATIONS, settings), {"positives_per_image": np.nan}, "positives_per_image: found nan"),
    ):
        with pytest.raises(ValueError, match=words):
            Memory(*arguments, heatmap_size=4, **options)
    assert not (tmp_path / "store").exists()


def test_a_store_of_another_size_is_refused_and_let_go(tmp_path):
    open_memory(tmp_path / "store").close()
    with pytest.raises(StoreError, match="has heatmaps of side 6, found heatmap_size 8"):
        open_memory(tmp_path / "store", heatmap_size=8)
    open_memory(tmp_path / "store").close()


# Saving and resuming


@pytest.mark.parametrize("ema", ["plain", "debiased"])
def test_a_killed_loop_resumes_within_the_epoch_as_if_it_had_not_been(tmp_path, ema):
    settings = {"top": 3, "compact_after": 2, "ema": ema}
    with open_memory(tmp_path / "whole", settings=settings) as memory:
        for _ in range(3):
            train_epoch(memory)
            memory.end_epoch()
        cuts = memory.selection.to_json()
    memory = open_memory(tmp_path / "killed", settings=settings)
    train_epoch(memory)
    memory.end_epoch()
    train_epoch(memory, IDS[:4])
    memory.skip([])
    memory.commit()
    state = memory.state_dict()
    train_epoch(memory, IDS[4:8])  # lost
    memory.close()
    with open_memory(tmp_path / "killed", settings=settings) as memory:
        memory.load_state_dict(state)
        assert memory.epoch == 1
        assert memory.visited.nonzero()[0].tolist() == IDS[:4].tolist()
        train_epoch(memory, IDS[memory.is_new(IDS)])
        memory.end_epoch()
        train_epoch(memory)
        memory.end_epoch()
        assert memory.selection.to_json() == cuts
        assert memory.store.group.layout == "topk"
    assert_same_rows(rows_at(tmp_path / "killed"), rows_at(tmp_path / "whole"))


def test_an_epoch_may_have_more_commits_than_there_are_slots(memory):
    """Of one shard, with state dicts after some of them."""
    for number, sample in enumerate(IDS[:5]):
        learn(memory, memory.lookup([sample]))
        memory.commit()
        if number % 2:
            memory.state_dict()
    memory.end_epoch()
    assert memory.store.last_epochs()[IDS[:6]].tolist() == [0] * 5 + [-1]


def test_skipped_samples_are_not_new_after_a_resume(tmp_path):
    with open_memory(tmp_path / "store") as memory:
        memory.skip([3])
        memory.commit()
        state = memory.state_dict()
    with open_memory(tmp_path / "store") as memory:
        memory.load_state_dict(state)
        assert memory.is_new([2, 3, 4]).tolist() == [True, False, True]
        memory.commit()
        memory.load_state_dict(memory.state_dict())
        assert memory.is_new([2, 3, 4]).tolist() == [True, False, True]
        memory.end_epoch()
        assert memory.is_new([3]).all()


def test_a_state_names_what_was_committed_only(memory):
    learn(memory, memory.lookup(IDS[:4]))
    with pytest.raises(StoreError, match=r"Call commit\(\) or end_epoch\(\) before"):
        memory.state_dict()
    memory.commit()
    assert memory.state_dict()["snapshot"] == memory.snapshot


def test_a_store_with_learnt_rows_needs_a_state_or_a_reset(tmp_path):
    with open_memory(tmp_path / "store") as memory:
        fresh = memory.lookup(IDS[:4])
        train_epoch(memory)
        memory.end_epoch()  # killed before the first checkpoint is saved
        train_epoch(memory)
        memory.end_epoch()
    with open_memory(tmp_path / "store") as memory:
        with pytest.raises(StoreError, match=r"has trained rows up to epoch 2. Call load_state_dict"):
            memory.lookup(IDS[:4])
        for call in (memory.commit, memory.end_epoch):
            with pytest.raises(StoreError, match="Call load_state_dict"):
                call()
        memory.reset()
        assert memory.epoch == 0
        again = memory.lookup(IDS[:4])
        assert torch.equal(again.scores, fresh.scores)
        train_epoch(memory)
        memory.end_epoch()
        memory.state_dict()
        train_epoch(memory)
        memory.end_epoch()
        with pytest.raises(StoreError, match="the beginning is not retained any more"):
            memory.reset()


def test_the_newest_state_stays_loadable_whatever_is_committed(tmp_path):
    """Also if the process is killed between commits and the next checkpoint, and killed again."""
    with open_memory(tmp_path / "store") as memory:
        for _ in range(5):
            train_epoch(memory)
            memory.end_epoch()
            state = memory.state_dict()
        committed = rows_at(tmp_path / "store")
    for _ in range(3):
        with open_memory(tmp_path / "store") as memory:
            memory.load_state_dict(state)
            assert memory.epoch == 5
            assert_same_rows(memory.store.read(IDS), committed)
            for _ in range(2):
                train_epoch(memory)
                memory.end_epoch()
            assert len(memory.store.snapshots()) == 2


def test_states_that_do_not_belong_to_the_store_are_refused(tmp_path):
    states = []
    for name in ("one", "other"):
        with open_memory(tmp_path / name) as memory:
            for _ in range(3):
                train_epoch(memory)
                memory.end_epoch()
                states.append(memory.state_dict())
            memory.commit()
            kept = [snapshot.id for snapshot in memory.store.snapshots()]
    with open_memory(tmp_path / "other") as memory:
        with pytest.raises(StoreError, match="was committed by 'own-loop-"):
            memory.load_state_dict(states[2])
        with pytest.raises(StoreError, match=rf"no snapshot {states[3]['snapshot']}; retained are"):
            memory.load_state_dict(states[3])
        with pytest.raises(ValueError, match=r"expected what Memory\.state_dict returned"):
            memory.load_state_dict({"model": 3})
        memory.load_state_dict(states[5])
    assert states[5]["snapshot"] in kept


def test_a_store_in_memory_ends_with_the_memory():
    memory = open_memory(None, settings={"kind": "ram", "url": None})
    backend = memory.store.backend
    train_epoch(memory)
    memory.end_epoch()
    assert backend.names("")
    memory.close()
    assert not backend.names("")


# Ranks


@pytest.mark.parametrize(
    "settings",
    [{}, {"codec": "uint8"}, {"top": 3, "compact_after": 1}, {"resident_gb": 1e-9}],
    ids=["dense", "uint8", "top", "evicted"],
)
@pytest.mark.parametrize("world_size", [2, 5])
def test_ranks_that_share_shards_learn_what_one_rank_does(tmp_path, world_size, settings):
    """Some samples are skipped or not visited; the second epoch is saved twice, and resumed in between."""
    with open_memory(tmp_path / "one", settings=settings) as memory:
        for _ in range(2):
            train_epoch(memory, IDS[3:])
            memory.end_epoch()
        expected = memory.selection.to_json()

    def train(transport):
        with open_memory(tmp_path / "two", ranks=transport, settings=settings) as memory:
            _train_planned(memory, transport.rank)
            memory.end_epoch()
            _train_planned(memory, transport.rank, most=1)
            memory.commit()
            state = memory.state_dict()
            _train_planned(memory, transport.rank, most=1)
        with open_memory(tmp_path / "two", ranks=transport, settings=settings) as memory:
            memory.load_state_dict(state)
            _train_planned(memory, transport.rank, most=1)
            memory.commit()
            _train_planned(memory, transport.rank)
            memory.end_epoch()
            return memory.selection.to_json()

    assert run_threads(train, world_size) == [expected] * world_size
    assert_same_rows(rows_at(tmp_path / "two"), rows_at(tmp_path / "one"))


def _train_planned(memory, rank, most=None):
    planned = memory.plan(batch_size=2, seed=memory.epoch)
    assert any(planned.borrowed(rank) for rank in range(planned.world_size))
    for ids in list(planned.batches(rank))[:most]:
        if len(wanted := ids[np.isin(ids, IDS[3:])]):
            learn(memory, memory.lookup(wanted, views_of(wanted, memory.epoch)))
        memory.skip(ids[ids == IDS[2]])


def test_a_shard_that_two_ranks_learn_is_refused_on_both(tmp_path):
    """Also with a commit in between, after which one rank would overwrite the other's rows unnoticed."""

    def train(transport):
        with open_memory(tmp_path / "store", ranks=transport) as memory:
            stale = memory.lookup(IDS[2:4])
            if transport.rank == 0:
                learn(memory, memory.lookup(IDS[:2]))
            memory.commit()
            if transport.rank == 1:
                learn(memory, stale)
            with pytest.raises(StoreError, match="shard 0: ranks 0 and 1 have updated samples of it"):
                memory.end_epoch()

    run_threads(train, 2)


def test_every_rank_raises_when_a_state_cannot_be_loaded(tmp_path):
    def load(transport):
        with open_memory(tmp_path / "store", ranks=transport) as memory:
            with pytest.raises(StoreError, match="no snapshot 50"):
                memory.load_state_dict({"snapshot": 50, "run": "x", "epoch": 0})

    run_threads(load, 2)


def test_shards_that_no_rank_has_learnt_are_divided_among_all():
    assert divide_shards([{3}, {0, 1}], 6) == [[2, 3, 5], [0, 1, 4]]
    assert divide_shards([set()], 2) == [[0, 1]]
