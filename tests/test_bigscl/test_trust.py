"""Hidden labels: which they are, that training does not see them, and what they say about mined ones."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

from bigscl.config import ConfigError, load_config
from bigscl.data.answers import Answer, AnswersFile, now
from bigscl.data.index import load_index
from bigscl.data.labels.training_labels import draw_given, hide_given, training_labels, with_hidden
from bigscl.memory.snapshot_state import SnapshotState
from bigscl.selection import trust as trusts
from bigscl.selection.thresholds import Thresholds
from bigscl.selection.trust import Canaries, Images, Trust, estimate
from bigscl.store import Annotations, Ragged, SingleProcess
from tests.builders import write_config
from tests.test_store.ranks import run_threads

# Which labels are hidden


@pytest.fixture(scope="module")
def index(shards):
    return draw_given(load_index(str(shards / "train-*.tar")), seed=1, positives=2)


def test_one_label_of_the_share_of_images_is_hidden_and_nothing_else_changes(index):
    hidden = hide_given(index, 0.3)
    rows = np.flatnonzero(hidden.hidden.lengths)
    assert len(rows) == round(0.3 * index.num_samples)
    assert hidden.hidden.lengths.max() == 1
    for row in range(len(index.keys)):
        assert sorted([*hidden.given[row], *hidden.hidden[row]]) == index.given[row].tolist()
    assert hidden.fingerprint != index.fingerprint
    assert np.array_equal(with_hidden(hidden).given.values, index.given.values)
    assert with_hidden(index) is index


def test_hidden_labels_are_the_same_every_time_and_others_with_another_seed(index):
    one, again, other = hide_given(index, 0.2), hide_given(index, 0.2), hide_given(index, 0.2, seed=1)
    assert one.fingerprint == again.fingerprint
    assert one.fingerprint != other.fingerprint


def test_images_without_a_label_are_not_chosen(index):
    lengths = np.where(np.arange(len(index.given)) % 2, index.given.lengths, 0)
    values = np.concatenate([index.given[row] for row in np.flatnonzero(lengths)])
    half = replace(index, given=Ragged.from_lengths(lengths, values))
    rows = np.flatnonzero(hide_given(half, 0.5).hidden.lengths)
    assert len(rows) == round(0.5 * np.count_nonzero(lengths))
    assert (rows % 2 == 1).all()


def test_an_answer_about_a_hidden_label_ends_its_test(index, tmp_path):
    hidden = hide_given(index, 0.3)
    yes, no, *others = np.flatnonzero(hidden.hidden.lengths).tolist()
    names = {row: index.class_names[hidden.hidden[row][0]] for row in (yes, no)}
    said = [
        Answer(key=index.name(row), class_name=names[row], yes=row == yes, who="ann", when=now())
        for row in (yes, no)
    ]
    AnswersFile(tmp_path / "answers.jsonl").append(said)
    found = training_labels(hidden, "given", tmp_path / "answers.jsonl").index
    assert np.flatnonzero(found.hidden.lengths).tolist() == others
    shown = with_hidden(found).labels_of(np.array([yes, no]))
    assert shown[0, index.class_names.index(names[yes])] == 1
    assert shown[1, index.class_names.index(names[no])] == 0


@pytest.mark.parametrize("labels", [{"labels": "full"}, {}])
def test_hidden_labels_that_would_have_no_use_are_refused(shards, tmp_path, labels):
    base = {} if labels else {"objective": {"base": "an", "consistency": "scl"}}
    config = write_config(tmp_path / "run.yaml", shards, data={"canaries": 0.1, **labels}, **base)
    with pytest.raises(ConfigError, match=r"data.canaries"):
        load_config(config)


# The estimate


def simulated(seed, *, separation, num_hidden=400, num_images=4000, num_classes=12, k=2.2, easier_alone=0.0):
    """Images with independent classes, single labels, and values that are higher for what is there.

    Classes differ in how frequent they are and in the level of their values; the only class of an image may
    have a higher value (`easier_alone`, in logits). Returns the estimate, and precision and recall of what is
    mined in labelled images.
    """
    random = np.random.default_rng(seed)
    frequencies = random.uniform(0.03, 0.3, num_classes)
    frequencies *= k / frequencies.sum()
    present = random.random((3 * num_images, num_classes)) < frequencies
    present = present[present.any(1)][:num_images]
    k = present.sum() / num_images
    given = np.array([random.choice(np.flatnonzero(row)) for row in present])
    level = random.normal(-3, 1, num_classes)
    logits = level + separation * present + random.normal(0, 1, present.shape)
    logits += easier_alone * present * (present.sum(1, keepdims=True) == 1)
    values = 1 / (1 + np.exp(-logits))
    is_hidden = np.arange(num_images) < num_hidden
    is_open = np.ones(present.shape, bool)
    is_open[~is_hidden, given[~is_hidden]] = False
    labels = np.bincount(given, minlength=num_classes)
    # Labels were trained on, so they rank first.
    order = np.argsort(np.where(is_open, values, 2), axis=0)[::-1]
    expected = np.zeros(present.shape, bool)
    for number, count in enumerate(np.rint(k * labels).astype(int)):
        expected[order[:count, number], number] = True
    mined = expected & is_open

    def images(mask, positives):
        return Images(
            values=values[mask],
            is_open=is_open[mask],
            mined=mined[mask],
            num_positives=mask.sum() * positives / num_images,
        )

    right, missing = (mined & present)[~is_hidden], (present & is_open)[~is_hidden]
    truth = right.sum() / mined[~is_hidden].sum(), right.sum() / missing.sum()
    found = estimate(
        images(is_hidden, k * labels),
        given[is_hidden],
        images(~is_hidden, (k - 1) * labels),
        labels=labels,
        epochs=9,
        num_samples=num_images,
    )
    return found, truth


@pytest.mark.parametrize("separation", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("seed", [0, 1])
def test_estimate_is_within_five_points_of_the_truth(seed, separation, monkeypatch):
    # Here a second class is as easy as the only one.
    monkeypatch.setattr(trusts, "OF_MISSING", (1.0, 1.0, 1.0))
    found, (precision, recall) = simulated(seed, separation=separation)
    assert found.precision == pytest.approx(precision, abs=0.05)
    assert found.recall == pytest.approx(recall, abs=0.05)
    assert found.low <= found.precision <= found.high


@pytest.mark.parametrize("seed", [1, 2])
def test_easy_labels_of_images_with_one_class_do_not_count_for_missing_ones(seed, monkeypatch):
    found, (precision, _) = simulated(seed, separation=1.0, easier_alone=1.0)
    assert found.precision == pytest.approx(precision, abs=0.03)
    monkeypatch.setattr(trusts, "OF_MISSING", (1.0, 1.0, 1.0))
    assert simulated(seed, separation=1.0, easier_alone=1.0)[0].precision > precision + 0.03


def test_no_more_missing_labels_are_found_than_hidden_ones(monkeypatch):
    """Whatever the values say."""
    whole = trusts.estimate

    def with_canaries_not_found(canaries, hidden, labelled, **facts):
        mined = canaries.mined.copy()
        mined[np.flatnonzero(mined[np.arange(len(hidden)), hidden])[10:]] = False
        return whole(replace(canaries, mined=mined), hidden, labelled, **facts)

    monkeypatch.setitem(globals(), "estimate", with_canaries_not_found)
    found, (precision, _) = simulated(0, separation=4.0)
    assert found.found == 10
    assert found.recall == pytest.approx(10 / 400)
    assert found.low < found.precision < found.high < 0.1 < precision
    assert not found.is_enough


def test_values_that_say_nothing_make_labels_that_are_not_to_be_trusted():
    found, (precision, _) = simulated(3, separation=0.0)
    assert found.precision == pytest.approx(precision, abs=0.05)
    assert not found.is_enough
    assert "too early to trust: 9 epochs, 333 images per class" in str(found)


def test_few_hidden_labels_say_nothing():
    found, _ = simulated(0, separation=4.0, num_hidden=20)
    assert not found.is_known
    assert "trust unknown, " in str(found)
    assert f"hide at least {trusts.FEWEST}" in str(found)
    assert simulated(0, separation=4.0, num_hidden=40)[0].is_enough


def test_groups_of_classes_have_the_labels_of_the_whole():
    found, _ = simulated(1, separation=2.0)
    assert [one.name for one in found.groups] == ["rare", "middle", "frequent"]
    assert sum(one.hidden for one in found.groups) == found.hidden == 400
    assert sum(one.found for one in found.groups) == found.found
    assert min(one.precision for one in found.groups) <= found.precision
    assert len(found.of_groups()) == 3


def test_likelihood_is_that_of_all_possible_labels():
    """A slow reference: every set of classes that an image can have, with its probability."""
    random = np.random.default_rng(0)
    values, hidden = random.uniform(0.05, 0.9, (4, 5)), np.array([0, 3, 2, 4])
    offsets, slope = random.normal(0, 0.5, 5), 1.3
    canaries = Images(
        values=values,
        is_open=np.ones(values.shape, bool),
        mined=np.zeros(values.shape, bool),
        num_positives=np.full(5, 4 * 2.1 / 5),
    )
    logits = slope * np.log(values / (1 - values)) + offsets
    shifts = np.linspace(-9, 9, 180_001)
    totals = np.array([(1 / (1 + np.exp(-(logits + shift)))).sum() for shift in shifts[::500]])
    near = np.interp(4 * 2.1, totals, shifts[::500])
    p = 1 / (1 + np.exp(-(logits + near)))
    wanted = 0.0
    for row, number in zip(p, hidden, strict=True):
        drawn = some = 0.0
        for present in itertools.product([False, True], repeat=5):
            chance = np.prod(np.where(present, row, 1 - row))
            some += chance * any(present)
            drawn += chance / max(1, sum(present)) * present[number]
        wanted += np.log(drawn / some)
    found = trusts._log_likelihood(canaries, hidden, slope, offsets)
    assert found == pytest.approx(wanted, abs=0.02)


def test_trust_comes_back_from_a_snapshot():
    found, _ = simulated(1, separation=2.0, num_images=600, num_hidden=60)
    again = Trust.from_json(found.to_json())
    assert str(again) == str(found)
    assert again.groups[0].found == found.groups[0].found
    state = SnapshotState(selection=Thresholds.none(12), skipped=[], trust=again)
    attributes = state.attributes()
    assert attributes["trust"]["hidden"] == 60
    unknown = estimate_of_nothing()
    assert not Trust.from_json(unknown.to_json()).is_known


def estimate_of_nothing() -> Trust:
    nothing = Images(
        values=np.zeros((2, 3)),
        is_open=np.ones((2, 3), bool),
        mined=np.zeros((2, 3), bool),
        num_positives=np.zeros(3),
    )
    counts = np.array([1, 1, 0])
    return estimate(nothing, np.array([0, 1]), nothing, labels=counts, epochs=1, num_samples=2)


# In the memory


SELECTION = Thresholds(
    score=np.full(3, 0.4, np.float16), tie_id=np.full(3, -1), num_expected=np.array([20, 20, 20])
)


def small_memory(momentum=0.8):
    """40 images of 3 classes in 3 shards: the first 10 have a hidden label, 5 of them above the threshold."""
    given = [[n % 3] if n >= 10 else [] for n in range(40)]
    annotations = Annotations.of(given, 3, rows_per_shard=16)
    lengths = (np.arange(annotations.num_rows) < 10).astype(np.int64)
    hidden = Ragged.from_lengths(lengths, np.arange(10) % 3)
    nothing = Ragged.from_lengths(0 * lengths, np.empty(0, np.int64))
    values = np.full((annotations.num_rows, 3), 0.1, np.float16)
    values[np.arange(5), np.arange(5) % 3] = 0.5
    values[20, 0] = 0.5
    chunks = [(np.arange(first, last), values[first:last]) for first, last in ((0, 16), (16, 32), (32, 40))]
    return Canaries(hidden, nothing, annotations, momentum=momentum), chunks


@pytest.mark.parametrize("momentum", [0.8, None])
def test_canaries_are_read_from_the_chunks_of_a_selection(momentum):
    canaries, chunks = small_memory(momentum)
    assert [ids.tolist() for ids, _ in canaries.noted(chunks)] == [ids.tolist() for ids, _ in chunks]
    found = canaries.trust(SELECTION, 4, SingleProcess())
    assert (found.hidden, found.found, found.epochs) == (10, 5, 4)
    assert found.images_per_class == pytest.approx(40 / 3, abs=0.001)
    assert found.precision > 0


def test_trust_is_the_same_on_two_ranks_as_on_one():
    alone, chunks = small_memory()
    list(alone.noted(chunks))
    wanted = str(alone.trust(SELECTION, 4, SingleProcess()))

    def of_rank(transport):
        canaries, _ = small_memory()
        list(canaries.noted(chunks[1:2] if transport.rank else [chunks[2], chunks[0]]))
        return str(canaries.trust(SELECTION, 4, transport))

    assert run_threads(of_rank, 2) == [wanted, wanted]
