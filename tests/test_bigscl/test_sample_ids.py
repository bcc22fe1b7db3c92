"""Samples of a webdataset pipeline get the row that the index has for them, wherever their tars come from."""

import gc
import pickle
import shutil
from itertools import islice

import numpy as np
import pytest
import torch
import webdataset as wds

from bigscl import Memory, RepeatedSample, SampleIds, StoreConfig
from bigscl.data.build_index import scan
from bigscl.data.webdataset import UnknownSample
from tests.builders import classed, write_shards, write_tar

SIZES = [5, 3, 4]
# Of webdataset: a pipeline that is not read to its end leaves its tar to the garbage collector.
pytestmark = [
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(autouse=True)
def _collect_garbage():
    yield
    gc.collect(1)  # the young objects: all of a large process take half a second


@pytest.fixture
def shards(tmp_path):
    (tmp_path / "shards").mkdir()
    urls = write_shards(tmp_path / "shards", SIZES)
    return urls, scan(urls)[0]


def read(urls, *stages):
    dataset = wds.WebDataset(urls, shardshuffle=False)
    for stage in stages:
        dataset = dataset.map(stage)
    return dataset


def test_a_pipeline_yields_every_row_of_the_index(shards):
    urls, index = shards
    for url_order in (urls, urls[::-1]):
        found = list(read(url_order, SampleIds(index)))
        assert sorted(sample["__id__"] for sample in found) == index.ids().tolist()
        assert all(index.key(sample["__id__"]) == sample["__key__"] for sample in found)
        labels = index.labels_of(np.array([sample["__id__"] for sample in found]))
        assert [int(sample["cls"]) for sample in found] == (labels == 1).argmax(1).tolist()


def test_an_id_passes_the_decoding_and_goes_into_a_batch(shards):
    urls, index = shards
    dataset = read(urls, SampleIds(index)).decode("torchrgb8").to_tuple("__id__", "jpg").batched(5)
    ids, _ = next(iter(dataset))
    assert torch.as_tensor(ids).tolist() == [0, 1, 2, 3, 4]


def test_shards_may_be_moved_piped_or_named_by_url(shards, tmp_path):
    urls, index = shards
    moved = shutil.copytree(tmp_path / "shards", tmp_path / "elsewhere")
    stage = SampleIds(index)
    name = "train-000001.tar"
    for url in (
        urls[1],
        f"{moved}/{name}",
        f"file:{moved}/{name}",
        f"pipe:cat {moved}/{name}",
        f"pipe:aws s3 cp s3://bucket/imagenet/{name} -",
        f"https://host/data/{name}?token=abc/def",
        name,
    ):
        assert stage.row(url, "k0006") == 1 * 5 + 1, url
    (sample, *_) = read([f"pipe:cat {moved}/{name}"], stage)
    assert sample["__id__"] == 5


def test_the_folder_decides_between_shards_of_one_name(tmp_path):
    urls = []
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        members = [*classed("one", 0, 0), *classed(folder, 1, 1)]
        urls.append(str(write_tar(tmp_path / folder / "train-000000.tar", members)))
    stage = SampleIds(scan(urls)[0])
    assert [stage.row(f"/mnt/{folder}/train-000000.tar", "one") for folder in ("a", "b")] == [0, 2]
    with pytest.raises(UnknownSample, match="2 shards of this name"):
        stage.row("/mnt/c/train-000000.tar", "one")


def test_unknown_samples_and_shards_are_errors_that_name_them(shards, tmp_path):
    urls, index = shards
    stage = SampleIds(index)
    with pytest.raises(UnknownSample, match=r"val-000000.tar: no shard of this name in the index"):
        stage.row("val-000000.tar", "k0000")
    with pytest.raises(UnknownSample, match=r"train-000000.tar: sample 'other' is not in the index"):
        stage.row(urls[0], "other")
    with pytest.raises(ValueError, match=r"has no __url__, found \['__key__', 'jpg'\]"):
        stage({"__key__": "k", "jpg": b""})
    (tmp_path / "changed").mkdir()
    members = [*classed("k0000", 0, 0), *classed("new", 1, 1)]
    changed = str(write_tar(tmp_path / "changed" / "train-000000.tar", members))
    with pytest.raises(UnknownSample, match="'new' is not in the index"):
        list(read([changed], stage))
    with pytest.warns(UserWarning, match="'new' is not in the index"):
        left = list(wds.WebDataset([changed], shardshuffle=False).map(stage, handler=wds.warn_and_continue))
    assert [sample["__id__"] for sample in left] == [0]


def test_few_shards_are_held_at_a_time(shards, monkeypatch):
    monkeypatch.setattr("bigscl.data.webdataset.MOST_SHARDS", 1)
    urls, index = shards
    stage = SampleIds(index)
    keys = [("k0000", 0), ("k0005", 1), ("k0001", 0), ("k0008", 2)]
    assert [stage.row(urls[shard], key) for key, shard in keys] == [0, 5, 1, 10]
    assert len(stage._places) == 1
    assert pickle.loads(pickle.dumps(stage)).row(urls[0], "k0001") == 1


def test_a_resampled_pipeline_is_refused_at_its_first_repeated_sample(shards, tmp_path):
    urls, index = shards
    dataset = wds.WebDataset(urls, resampled=True, shardshuffle=False).map(SampleIds(index))
    batches = ({"ids": [sample["__id__"]]} for sample in islice(dataset, 1000))
    settings = StoreConfig(url=str(tmp_path / "store"), warmup_heatmaps="scores")
    learnt = set()

    def learn_all(memory):
        for _, stored in memory.prefetch(batches):
            memory.update(stored, logits=torch.zeros(1, index.num_classes))
            learnt.update(stored.rows.tolist())

    with Memory(index.annotations(), settings, heatmap_size=4) as memory:
        with pytest.raises(RepeatedSample, match="comes a second time in epoch 0"):
            learn_all(memory)
        memory.end_epoch()
        assert set(np.flatnonzero(memory.store.last_epochs() == 0)) == learnt
