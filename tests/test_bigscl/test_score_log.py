"""The scores of every epoch: the right ones, on any number of ranks, and only of states that are there."""

import numpy as np
import pytest
import torch

import bigscl
from bigscl.common.digests import write_array
from bigscl.common.files import BadFile
from bigscl.memory.score_history import ScoreLog, log_folder, read_score_log
from bigscl.store import HeatmapStore, SingleProcess

NUM_CLASSES = 12
POSITIVES = [[n % NUM_CLASSES] if n % 5 else [0, 11] for n in range(23)]
ANNOTATIONS = bigscl.Annotations.of(POSITIVES, NUM_CLASSES, rows_per_shard=10)
IDS = np.arange(23)


def test_given_labels_of_rows_are_found():
    mask = ANNOTATIONS.of_rows(np.array([3, 0, 22]))
    assert [np.flatnonzero(row).tolist() for row in mask] == [POSITIVES[3], POSITIVES[0], POSITIVES[22]]


def chunks(random):
    scores = random.random((23, NUM_CLASSES)).astype(np.float16)
    return [(IDS[first : first + 10], scores[first : first + 10]) for first in (0, 10, 20)], scores


def write_epoch(folder, epoch, parts):
    log = ScoreLog(folder, ANNOTATIONS, SingleProcess(), 4)
    for part in parts:
        log.note(*part)
    log.write(epoch)


def test_kept_scores_come_back_epoch_by_epoch(tmp_path):
    random, all_scores = np.random.default_rng(0), []
    for epoch in range(3):
        parts, scores = chunks(random)
        all_scores.append(scores)
        write_epoch(tmp_path, epoch, parts[::-1])
    found = read_score_log(tmp_path, ANNOTATIONS, before_epoch=2)
    assert list(found) == [0, 1]
    for epoch, pairs in found.items():
        for n, row in enumerate(pairs):
            kept = dict(zip(row["class"].tolist(), row["score"].tolist(), strict=True))
            others = [c for c in np.argsort(-all_scores[epoch][n], kind="stable") if c not in POSITIVES[n]]
            assert set(kept) == {*POSITIVES[n], *others[: 4 - len(POSITIVES[n])]}
            assert all(score == all_scores[epoch][n, number] for number, score in kept.items())


class Rank:
    """One of two ranks that run one after the other, rank 1 first; what it sends waits for rank 0."""

    world_size = 2

    def __init__(self, rank, post):
        self.rank, self._post = rank, post

    def gather(self, payload):
        if self.rank:
            self._post.append(payload)
            return None
        return [payload, self._post.pop(0)]

    def broadcast(self, payload):
        return b"+" if payload is None else payload


def test_ranks_write_the_file_of_one_process(tmp_path):
    parts, _ = chunks(np.random.default_rng(1))
    write_epoch(tmp_path / "alone", 0, parts)
    post = []
    for rank, own in ((1, parts[1:2]), (0, [parts[2], parts[0]])):
        log = ScoreLog(tmp_path / "both", ANNOTATIONS, Rank(rank, post), 4)
        for part in own:
            log.note(*part)
        log.write(0)
    files = [log_folder(tmp_path / name, ANNOTATIONS) / "epoch-0000.npy" for name in ("alone", "both")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_scores_of_other_labels_are_not_read(tmp_path):
    parts, _ = chunks(np.random.default_rng(2))
    write_epoch(tmp_path, 0, parts)
    other = bigscl.Annotations.of([[1]] * 23, NUM_CLASSES, rows_per_shard=10)
    assert read_score_log(tmp_path, other, before_epoch=9) == {}


@pytest.mark.parametrize(
    "content",
    [b"", b"nonsense" * 40, "short", "other type", "flipped"],
    ids=["empty", "nonsense", "short", "type", "flipped"],
)
def test_a_damaged_file_is_named(tmp_path, content):
    parts, _ = chunks(np.random.default_rng(2))
    write_epoch(tmp_path, 0, parts)
    file = log_folder(tmp_path, ANNOTATIONS) / "epoch-0000.npy"
    whole = np.load(file)
    if content == "short":
        write_array(file, whole[:5])
    elif content == "other type":
        write_array(file, whole["score"])
    elif content == "flipped":
        data = bytearray(file.read_bytes())
        data[-20] ^= 1
        file.write_bytes(data)
    else:
        file.write_bytes(content)
    with pytest.raises(BadFile, match=r"epoch-0000\.npy"):
        read_score_log(tmp_path, ANNOTATIONS, before_epoch=9)


@pytest.mark.parametrize("positives_per_image", [1.5, None])
def test_a_memory_keeps_what_it_holds_at_the_end_of_each_epoch(tmp_path, positives_per_image):
    settings = bigscl.StoreConfig(url=str(tmp_path / "store"))
    options = {"heatmap_size": 4, "positives_per_image": positives_per_image}
    expected = {}
    with bigscl.Memory(ANNOTATIONS, settings, **options) as memory:
        log = ScoreLog(tmp_path, ANNOTATIONS, SingleProcess(), NUM_CLASSES)
        for epoch in range(2):
            torch.manual_seed(epoch)
            maps = torch.rand(23, NUM_CLASSES, 2, 2)
            memory.update(memory.lookup(IDS), logits=torch.randn(23, NUM_CLASSES), maps=maps)
            memory.end_epoch(score_log=log)
            with HeatmapStore.open(tmp_path / "store", annotations=ANNOTATIONS) as store:
                expected[epoch] = store.read(IDS).scores
    found = read_score_log(tmp_path, ANNOTATIONS, before_epoch=2)
    assert list(found) == [0, 1]
    for epoch, pairs in found.items():
        assert np.array_equal(pairs["score"], expected[epoch])
