"""Runs that learn from answers of people: from the start, and resumed with more of them."""

import numpy as np
import pytest

from bigscl.common.failures import STOPPED
from bigscl.config import load_config
from bigscl.data.answers import Answer, AnswersFile, now
from bigscl.distributed.ranks import SingleProcess
from bigscl.evaluation.run_plots import _stored_samples as stored_samples
from bigscl.memory.memory import show_nothing
from bigscl.store import Answered, HeatmapStore
from bigscl.training.checkpoint_folder import Checkpoints
from bigscl.training.run_folder import Run, RunFolder, open_data
from bigscl.training.run_memory import open_memory
from tests.builders import index_of, write_config
from tests.forks import trainer_server
from tests.integration.runs import (
    Running,
    assert_same_rows,
    assert_same_runs,
    copy_run,
    memory_of,
    store_of,
    train,
)

SCENES = (60, 20)

pytestmark = pytest.mark.timeout(360)
FIRST, LATER = 12, 40
"""Numbers of answers before the run starts, and before it is resumed."""


@pytest.fixture(scope="module")
def answers(shards):
    """True answers about pairs that no label names, one label that is refuted, and one that is confirmed."""
    index = index_of(shards)
    random, ids = np.random.default_rng(0), index.ids()
    given, full = index.labels_of(ids), index.labels_of(ids, "full")
    pairs = random.permutation(np.argwhere(given != 1))[: LATER - 2].tolist()
    named = np.argwhere(given == 1)
    given = [(n, c, bool(full[n, c] == 1)) for n, c in pairs]
    given[3:3] = [(*named[0].tolist(), False), (*named[-1].tolist(), True)]
    return [Answer(index.key(int(ids[n])), index.class_names[c], yes, "ann", now()) for n, c, yes in given]


@pytest.fixture(scope="module")
def stopped(tmp_path_factory, shards, answers):
    """The config of a run that was stopped in its second epoch; it knows of the first answers."""
    folder = tmp_path_factory.mktemp("stopped")
    AnswersFile(folder / "answers.jsonl").append(answers[:FIRST])
    config = write_config(folder / "run.yaml", shards, data=data_of(shards, folder), model=MODEL)
    with Running(config.with_suffix(""), config, environment={"STOP_AT_BATCH": "3"}) as running:
        assert running.wait(120) == STOPPED, running.output
    return config


MODEL = {"backbone": "tests.integration.tiny:stopping_net"}


def data_of(shards, folder):
    own = {"size": 48, "batch_size": 8, "workers": 1, "shuffle_buffer": 40, "crop": {"scale": [0.25, 1.0]}}
    return {"train": str(shards / "train-*.tar"), "answers": str(folder / "answers.jsonl"), **own}


def again(stopped, folder, shards, answers):
    """A copy of the stopped run with more answers."""
    folder.mkdir()
    AnswersFile(folder / "answers.jsonl").append(answers)
    config = write_config(folder / "run.yaml", shards, data=data_of(shards, folder), model=MODEL)
    copy_run(stopped.with_suffix(""), config.with_suffix(""))
    return config


def opened_memory(config):
    """The memory as the run opens it when it is resumed."""
    config = load_config(config)
    data = open_data(config)
    folder = RunFolder(config)
    folder.id = folder.read_id()
    latest = Checkpoints(folder.path / "checkpoints", 1).latest()
    side = HeatmapStore.open(folder.path / "store").spec.heatmap_size
    run = Run(config=config, folder=folder, data=data, ranks=SingleProcess(), heatmap_size=side)
    return open_memory(run, latest.progress.snapshot, latest.progress.epoch, "cpu", show_nothing)


def test_a_new_run_has_the_answers_in_its_labels_and_counts(tmp_path, shards, answers):
    AnswersFile(tmp_path / "answers.jsonl").append(answers)
    config = load_config(write_config(tmp_path / "run.yaml", shards, data=data_of(shards, tmp_path)))
    plain = load_config(write_config(tmp_path / "plain.yaml", shards))
    data, before = open_data(config), open_data(plain)
    ids = before.train.ids()
    expected = before.train.labels_of(ids)
    places = {before.train.key(int(sample)): place for place, sample in enumerate(ids)}
    for one in answers:
        expected[places[one.key], before.train.class_names.index(one.class_name)] = one.yes
    np.testing.assert_array_equal(data.train.labels_of(ids), expected)
    np.testing.assert_array_equal(data.annotations.counts(), (expected == 1).sum(0))
    assert data.annotations.fingerprint == before.annotations.fingerprint


def test_only_rows_of_new_answers_change_when_the_run_is_resumed(tmp_path, stopped, shards, answers):
    config = again(stopped, tmp_path / "more", shards, answers)
    folder = config.with_suffix("")
    before, ids = memory_of(folder, shards), index_of(shards).ids()
    with opened_memory(config) as memory:
        after, epoch = memory.store.read(ids), memory.epoch
        known = Answered.at(memory.store.snapshot)
        assert (memory.visited == opened_visits(stopped)).all()
    index = index_of(shards)
    places = {index.key(int(sample)): place for place, sample in enumerate(ids)}
    new = np.unique([places[one.key] for one in answers[FIRST:]])
    others = np.setdiff1d(np.arange(len(ids)), new)
    assert len(others) > 10
    assert len(known) == LATER
    assert epoch == 1
    assert_same_rows(after.take(others), before.take(others))
    for one in answers[FIRST:]:
        assert after.scores[places[one.key], index.class_names.index(one.class_name)] == one.yes
    with opened_memory(config) as memory:
        assert_same_rows(memory.store.read(ids), after)


def test_heatmaps_are_shown_with_the_answers_that_their_rows_have(tmp_path, stopped, shards, answers):
    config = again(stopped, tmp_path / "more", shards, answers)
    ids = index_of(shards).ids()
    before, after = (stored_samples(load_config(one), ids) for one in (stopped, config))
    for one, same in zip(before, after, strict=True):
        assert_same_rows(same.rows, one.rows)


def opened_visits(config):
    with opened_memory(again_copy(config)) as memory:
        return memory.visited


def again_copy(config):
    """A copy of a stopped run as it is, so that opening it leaves the run alone."""
    target = config.with_name("copy.yaml")
    if not target.exists():
        target.write_text(
            config.read_text().replace(f"run: {config.with_suffix('')}", f"run: {target.with_suffix('')}")
        )
        copy_run(config.with_suffix(""), target.with_suffix(""))
    return target


@pytest.mark.parametrize("processes", [1, 2])
def test_a_start_that_dies_in_the_update_is_taken_up(
    tmp_path, stopped, shards, answers, monkeypatch, processes
):
    whole = again(stopped, tmp_path / "whole", shards, answers)
    died = again(stopped, tmp_path / "died", shards, answers)

    def dies(self, **_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(HeatmapStore, "commit", dies)
        with pytest.raises(KeyboardInterrupt):
            opened_memory(died)
    with opened_memory(died):
        pass  # the update is committed, and no checkpoint names it
    for config in (whole, died):
        train(config, processes=processes)
    assert_same_runs(whole.with_suffix(""), died.with_suffix(""), shards)
    store = store_of(whole.with_suffix(""), shards)
    assert len(Answered.at(store.snapshot)) == LATER
    assert store.snapshot.epoch == 2
    yes = [one for one in answers if one.yes]
    index = index_of(shards)
    numbers = {index.key(int(sample)): int(sample) for sample in index.ids()}
    rows = np.array([numbers[one.key] for one in yes])
    classes = np.array([index.class_names.index(one.class_name) for one in yes])
    assert store.annotations.is_given(rows, classes).all()
    kept = store.read(rows).kept_classes()
    assert (kept == classes[:, None]).any(axis=1).all()


@pytest.mark.parametrize("how", ["lost", "none", "other"])
def test_answers_that_the_run_knew_are_missed(tmp_path, stopped, shards, answers, how):
    config = again(stopped, tmp_path / "less", shards, answers)
    given = {"lost": answers[1:], "other": answers[FIRST:], "none": []}[how]
    (tmp_path / "less" / "answers.jsonl").unlink()
    AnswersFile(tmp_path / "less" / "answers.jsonl").append(given)
    before = memory_of(config.with_suffix(""), shards)
    words = ["--data.answers", "null"] if how == "none" else []
    done = trainer_server().run_module("bigscl.train", config, *words)
    assert done.returncode == 2
    assert "the memory of this run has learnt from" in done.stderr
    assert "Give the file of answers that the run was trained with" in done.stderr
    assert_same_rows(memory_of(config.with_suffix(""), shards), before)


def test_a_withdrawn_answer_is_no_lost_one(tmp_path, stopped, shards, answers):
    config = again(stopped, tmp_path / "undo", shards, answers[:FIRST])
    undone = [Answer(one.key, one.class_name, None, "ann", now()) for one in answers[:FIRST]]
    AnswersFile(tmp_path / "undo" / "answers.jsonl").append(undone)
    with opened_memory(config) as memory:
        assert memory.store.annotations.fingerprint == index_of(shards).annotations().fingerprint
        np.testing.assert_array_equal(
            open_data(load_config(config)).annotations.counts(), index_of(shards).annotations().counts()
        )
