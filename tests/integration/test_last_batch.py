"""The last batch of an epoch has more than one image, so that batch normalisation can train on it."""

from collections import Counter

import pytest

from tests.builders import TWO_EPOCHS, make_shards, write_config
from tests.integration.runs import assert_same_runs, copy_run, ids_of, train

pytestmark = pytest.mark.timeout(360)
EPOCHS = 2


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Epochs of 13 images in batches of 4: one image is left over. Checkpoints are after steps 3, 4, 6, 8."""
    folder = tmp_path_factory.mktemp("last")
    return write_config(
        folder / "run.yaml",
        make_shards(folder / "shards", 13, 13),
        data={"batch_size": 4, "workers": 1},
        model={"backbone": "tests.integration.tiny:gated_net"},
        store={"slots": 5},
        schedule=TWO_EPOCHS,
        checkpoint={"every_steps": 3},
        log={"trackers": [], "pictures_every": 0, "every_steps": 1, "ids": True},
    )


def all_once():
    return Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(13))


def test_the_image_left_over_shares_a_batch_also_after_a_resume(config):
    train(config)
    folder = config.with_suffix("")
    assert ids_of(folder) == all_once()
    again = copy_run(folder, folder.with_name("again"))
    # Three of the four batches of the first epoch: the last one of them gave up an image.
    train(config, "--run", again, "--resume", again / "checkpoints" / "step-00000003")
    assert_same_runs(again, folder, config.parent / "shards")
    assert sorted(sample for epoch, sample in ids_of(again) if epoch == 0) == sorted(
        sample for epoch, sample in list(ids_of(folder))[11:13] if epoch == 0
    )


def test_two_ranks_train_on_each_image_once(config):
    folder = config.with_name("two")
    train(config, "--run", folder, "--data.batch_size", 3, processes=2)
    assert ids_of(folder) == all_once()
