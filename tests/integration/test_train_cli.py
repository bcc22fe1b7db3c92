"""What a user meets: every objective and option runs, and every mistake ends in one clear message."""

import json
import math
import shutil
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from safetensors.torch import load_file

from bigscl.config import load_config
from bigscl.data.build_index import scan
from bigscl.data.epoch_plan import training_plan
from bigscl.data.index import is_list_of
from bigscl.data.labels.training_labels import with_given_labels
from bigscl.losses.objective import Base, Consistency
from bigscl.models.smallnet import small_resnet
from bigscl.store import HeatmapStore
from tests.builders import TWO_EPOCHS, index_of, make_shards, write_config, write_shards
from tests.integration.runs import (
    assert_same_rows,
    assert_same_weights,
    call_all,
    command,
    copy_run,
    losses_of,
    train,
    weights_of,
)

# The first test of a file also pays for the runs that the others compare with.
pytestmark = pytest.mark.timeout(360)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """Two shards with two batches each."""
    return make_shards(tmp_path_factory.mktemp("small"), 24, 12, val=8)


def dotted(**changes):
    return [word for name, value in changes.items() for word in (f"--{name}", json.dumps(value))]


# Every objective and option

SETTINGS_OF = {
    "em_apl": {"objective.em_apl.start_epoch": 1},
    "ll_r": {"objective.large_loss.rate": 0.1},
    "ll_ct": {"objective.large_loss.rate": 0.1},
    "ll_cp": {"objective.large_loss.rate": 0.1},
    "boostlu": {"objective.boostlu.rate": 0.1},
}
"""So that two epochs show what a loss does later on."""
CONSISTENCY_OF = {"em_apl": "none", "crisp": "none", "ep": "cl"}
# Base and consistency are added up: each is tried once here, and every pair in tests/pairs.
TRIED = {
    **{(base, CONSISTENCY_OF.get(base, "scl")): None for base in get_args(Base)},
    **{("en", consistency): None for consistency in get_args(Consistency)},
}
OBJECTIVES = {
    f"{base}+{consistency}": {
        "objective.base": base,
        "objective.consistency": consistency,
        **SETTINGS_OF.get(base, {}),
    }
    for base, consistency in TRIED
}
NO_MEMORY = {"objective.base": "an", "objective.consistency": "none", "store.top": None}
OPTIONS = {
    "no store": {**NO_MEMORY, "store.kind": "none"},
    "oracle": {**NO_MEMORY, "objective.base": "bce", "data.labels": "full"},
    "scores in warm-up": {"store.warmup_heatmaps": "scores"},
    "dense for ever": {"store.top": None},
    "no warm-up": {"schedule.warmup.epochs": 0, "schedule.main.epochs": 2, "store.compact_after": 1},
    "debiased": {"store.ema": "debiased"},
    "debiased from scores": {"store.ema": "debiased", "store.warmup_heatmaps": "scores"},
    "average of weights": {"weight_ema": 0.9},
    "clipping": {"optimizer.clip": 0.1},
    "erasing": {"data.erase": {"probability": 0.8}},
    "colours": {"data.color_jitter": {"brightness": 0.4, "hue": 0.1}},
    "more given": {"data.given": {"seed": 3, "positives": 2, "negatives": 1}},
    "best by map pooling": {"validation.pooling": "map"},
    "no kept scores": {"log.score_classes": 0},
    "bf16": {"hardware.precision": "bf16"},
    "channels last": {"hardware.channels_last": True},
    "frozen stages": {"model.freeze_stages": 1, "model.backbone": "bigscl.models.smallnet:small_resnet"},
    "frozen statistics": {
        "model.freeze_statistics": True,
        "model.backbone": "bigscl.models.smallnet:small_resnet",
    },
    "rms": {"objective.norm": "rms"},
    "accumulation": {"optimizer.accumulate": 3},
    "sgd": {"optimizer.name": "sgd"},
    "K from validation": {"selection.K": "auto"},
    "pictures": {"log.pictures_every": 2, "log.trackers": ["tensorboard"]},
}


SAME_NETWORK = {"bf16", "channels last", "pictures", "average of weights"}
SAME_NETWORK |= {"best by map pooling", "no kept scores"}
"""Options that change nothing in the trained weights, or only how they are rounded."""
RESUMED = [
    "role+scl",
    "ll_cp+scl",
    "em_apl+none",
    "crisp+none",
    "ep+cl",
    "en+scl",
    "no store",
    "scores in warm-up",
    "debiased",
    "average of weights",
]
RESUMED += ["erasing", "accumulation", "sgd"]


@pytest.fixture(scope="module")
def base(tmp_path_factory, small):
    """A config of two epochs with four batches each: the last checkpoints are of steps 4, 6 and 8."""
    return write_config(
        tmp_path_factory.mktemp("runs") / "base.yaml",
        small,
        data={"val": str(small / "val-*.tar"), "workers": 0, "batch_size": 6},
        schedule=TWO_EPOCHS,
        checkpoint={"every_steps": 3},
    )


@pytest.fixture(scope="module")
def ended(base):
    """How the run of each variant ended; its folder is `base.parent / name`."""
    variants = {**OBJECTIVES, **OPTIONS}
    calls = {name: [base, "--run", base.parent / name, *dotted(**variants[name])] for name in variants}
    return call_all(calls)


@pytest.mark.parametrize("name", [*OBJECTIVES, *OPTIONS])
def test_objectives_and_options_train(base, ended, small, name):
    folder = base.parent / name
    assert ended[name]["code"] == 0, ended[name]["errors"]
    losses = losses_of(folder)
    assert [step for step, _ in losses] == list(range(1, len(losses) + 1))
    assert all(math.isfinite(loss) for _, loss in losses)
    # Entropy is maximised, so that its negative is minimised.
    assert all(loss > 0 for _, loss in losses) or name.startswith("em_apl")
    assert (folder / "best" / "model.safetensors").exists()
    assert (folder / "scores").exists() == (name not in ("no store", "no kept scores"))
    if name != "no store":
        assert (memory_of_variant(folder, small)["last_epoch"] == 1).all()


def memory_of_variant(folder, shards):
    """What the store holds, whichever labels the config chose."""
    data, index = load_config(folder / "config.yaml").data, index_of(shards)
    if data.given is not None:
        index = with_given_labels(index, None, data.given)
    return HeatmapStore.open(folder / "store", annotations=index.annotations(data.labels)).read(index.ids())


@pytest.mark.parametrize("name", sorted(OPTIONS.keys() - SAME_NETWORK))
def test_options_have_an_effect(base, ended, name):
    """A setting that changed nothing would be accepted and ignored."""
    weights, usual = (weights_of(base.parent / each) for each in (name, "en+scl"))
    assert weights.keys() != usual.keys() or any(not weights[key].equal(usual[key]) for key in usual)


def moved_in(folder):
    """Names of what the last epoch, of the whole network, has changed in it."""
    first, last = sorted((folder / "checkpoints").iterdir())[::2]
    first, last = (load_file(path / "model.safetensors") for path in (first, last))
    return {name for name in first if not first[name].equal(last[name])}


def test_frozen_stages_keep_their_weights(base, ended):
    moved = {name.split(".")[0] for name in moved_in(base.parent / "frozen stages")}
    assert moved == {"layer1", "layer2", "layer3", "fc"}


def test_frozen_statistics_stay_while_the_weights_move(base, ended):
    weights = dict(small_resnet(10).named_parameters())
    assert moved_in(base.parent / "frozen statistics") == weights.keys()


def test_average_of_the_weights_is_what_is_kept_as_best(base, ended):
    folder = base.parent / "average of weights"
    best = load_file(folder / "best" / "model.safetensors")
    candidates = [load_file(path / "model.safetensors") for path in (folder / "checkpoints").iterdir()]
    assert not any(best["fc.weight"].equal(weights["fc.weight"]) for weights in candidates)


def test_validation_shows_its_progress(ended):
    assert ended["en+scl"]["errors"].count("validating on 8 images, in batches") == 2


def test_a_run_lists_the_samples_of_its_store(base, ended, small):
    index = index_of(small)
    assert is_list_of(index, base.parent / "en+scl" / "samples.json")
    assert not (base.parent / "no store" / "samples.json").exists()


def test_pictures_and_trackers_are_written(base, ended):
    folder = base.parent / "pictures"
    assert [path.name for path in (folder / "pictures").iterdir()] == ["epoch-002.png"]
    assert list((folder / "tensorboard").rglob("events.*"))


def test_precision_that_the_cpu_lacks_is_replaced_aloud(base, ended):
    same = losses_of(base.parent / "bf16") == losses_of(base.parent / "en+scl")
    assert same == ("bf16 does not work on this CPU" in ended["bf16"]["errors"])


def test_variants_resume_in_mid_epoch_bit_for_bit(base, ended, small):
    """From the only checkpoint in mid-epoch that was kept."""
    calls = {}
    for name in RESUMED:
        folder = copy_run(base.parent / name, base.parent / f"{name} resumed")
        _, middle, _ = sorted((folder / "checkpoints").iterdir())
        changes = {**OBJECTIVES, **OPTIONS}[name]
        calls[name] = [base, "--run", folder, *dotted(**changes), "--resume", middle]
    for name, end in call_all(calls).items():
        once, again = base.parent / name, base.parent / f"{name} resumed"
        assert end["code"] == 0, end["errors"]
        assert "resuming from" in end["errors"]
        assert losses_of(again) == losses_of(once), name
        assert_same_weights(weights_of(again), weights_of(once))
        assert_same_weights(*(load_file(run / "best" / "model.safetensors") for run in (again, once)))
        if name != "no store":
            assert_same_rows(memory_of_variant(again, small), memory_of_variant(once, small))


# Mistakes


@pytest.fixture(scope="module")
def mistakes(tmp_path_factory, base, ended, small):
    """How calls with a mistake in them ended; tests/test_tools/test_mistakes.py has more."""
    folder = tmp_path_factory.mktemp("mistakes")
    other, _ = scan([str(small / "val-000000.tar")], class_names=list("abcdefghij"))
    other.save(folder / "other.npz")
    plain, _ = scan(write_shards(folder, [6], num_classes=10), class_names=index_of(small).class_names)
    plain.save(folder / "bigscl-index-train.npz")
    one_label = {"data.val": str(folder / "train-*.tar"), "selection.K": "auto"}
    conflict = {"store.kind": "none", "objective.norm": "rms", "objective.consistency": "none"}
    diverging = {"optimizer.name": "sgd", "schedule.warmup.learning_rate": 1e30}
    finished, another = base.parent / "en+scl", ["--run", folder / "another"]
    copied = copy_run(finished, folder / "copied")
    memory = [base, "--run", folder / "memory", *dotted(**{"store.kind": "ram"})]
    ended = call_all(
        {
            "conflicts": [base, *another, *dotted(**conflict)],
            "other classes": [base, *another, "--data.val_index", folder / "other.npz"],
            "never": [base, "--run", finished, "--resume", "never"],
            "no checkpoint": [base, *another, "--resume", folder],
            "store of a run": [base, *another, "--store.url", finished / "store"],
            "store of other data": [base, "--run", copied, *dotted(**{"data.given": {"seed": 1}})],
            "store of other maps": [base, *another, "--store.url", finished / "store", "--data.size", 64],
            "one label": [base, *another, *dotted(**one_label)],
            "memory": memory,
            "memory again": memory,
            "fp16": [base, *another, *dotted(**{"hardware.precision": "fp16"})],
            "backbone": [base, *another, "--model.backbone", "resnet5000"],
            "divergence": [base, "--run", folder / "diverged", *dotted(**diverging)],
            "print": [base, "--print-config", "--seed", 7],
            "finished": [base, "--run", finished],
        }
    )
    return {**ended, "folder": folder}


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("conflicts", ["2 mistakes", "store.kind", "objective.norm"]),
        ("other classes", ["data.val", "classes"]),
        ("never", ["en+scl", "step-00000008", "--resume"]),
        ("no checkpoint", ["--resume", "not a checkpoint"]),
        ("store of a run", ["was written by run", "store.url"]),
        ("store of other data", ["made for data"]),
        ("store of other maps", ["side 12", "needs 16"]),
        ("one label", ["selection.K: auto", "none of the 6 has two labels"]),
        ("memory again", ["store.kind: ram", "cannot be resumed"]),
        ("fp16", ["hardware.precision", "needs a GPU"]),
        ("backbone", ["resnet5000"]),
        ("divergence", ["loss"]),
    ],
)
def test_mistakes_end_in_one_message_and_exit_code_2(mistakes, name, parts):
    assert mistakes[name]["code"] == 2, mistakes[name]["errors"]
    assert mistakes[name]["errors"].count("bigscl.train: ") == 1
    assert "Traceback" not in mistakes[name]["errors"]
    message = mistakes[name]["errors"].split("bigscl.train: ")[1]
    assert all(part in message for part in parts), message


def test_a_start_that_is_refused_leaves_no_folder(mistakes, base):
    """The next start has nothing to trip over. Weights that cannot be loaded fail where the network does."""
    assert mistakes["backbone"]["code"] == mistakes["one label"]["code"] == 2
    assert not (mistakes["folder"] / "another").exists()


def test_mistakes_leave_a_finished_run_alone(mistakes, base, small):
    assert mistakes["finished"]["code"] == 0
    assert "en+scl: already finished, all 2 epochs are trained" in mistakes["finished"]["errors"]
    assert (memory_of_variant(base.parent / "en+scl", small)["last_epoch"] == 1).all()
    assert len(losses_of(base.parent / "en+scl")) == 8


def test_printed_config_says_the_same_when_it_is_loaded(tmp_path, mistakes, base):
    assert mistakes["print"]["code"] == 0
    (tmp_path / "printed.yaml").write_text(mistakes["print"]["output"])
    assert load_config(tmp_path / "printed.yaml") == load_config(base, ["--seed", "7"])


def test_ranks_make_one_mistake_together(base, trainer_server):
    _, _, *launcher = command([base, "--data.train", "/nowhere/train-*.tar"], processes=2)
    done = trainer_server.run_module(*launcher)
    assert done.returncode != 0
    assert done.stderr.count("bigscl.train: ") == 1, done.stderr


def test_mistake_that_only_one_rank_meets_at_the_start_is_printed(base, trainer_server):
    backbone = "tests.integration.tiny:net_of_rank_0"
    _, _, *launcher = command([base, "--model.backbone", backbone], processes=2)
    done = trainer_server.run_module(*launcher)
    assert done.returncode != 0
    *_, traceback = done.stderr.partition("Root Cause (first observed failure):")
    assert "RuntimeError: no network on rank 1" in traceback, done.stderr


# Bad images

ALLOWED = ["--data.max_bad_share", 0.13]
"""Three of 24 pictures, but not two of the 12 that are left in mid-epoch."""


@pytest.fixture(scope="module")
def damaged(tmp_path_factory, base, small):
    """The small shards with garbage for the first picture of epoch 1, and for its last two."""
    folder = tmp_path_factory.mktemp("damaged")
    shutil.copytree(small, folder, dirs_exist_ok=True)
    index, config = index_of(folder), load_config(base)
    plan = training_plan(
        index.shard_sizes,
        index.rows_per_shard,
        seed=config.seed,
        epoch=1,
        batch_size=config.data.batch_size,
        shuffle_buffer=config.data.shuffle_buffer,
    )
    order = np.concatenate(list(plan.batches(0)))
    bad = [int(order[place]) for place in (0, -2, -1)]
    for sample in bad:
        with Path(index.urls[sample // index.rows_per_shard]).open("r+b") as tar:
            tar.seek(int(index.image_offsets[sample]))
            tar.write(b"\0" * int(index.image_bytes[sample]))
    return folder, bad


@pytest.fixture(scope="module")
def skipping(base, damaged):
    """How runs over damaged pictures ended: one that allows a few, and one that does not."""
    usual = [base, "--data.train", damaged[0] / "train-*.tar"]
    few = [*usual, *ALLOWED, "--run", base.parent / "few"]
    return call_all({"few": few, "many": [*usual, "--run", base.parent / "many"]})


def test_damaged_pictures_are_skipped_until_they_are_too_many(base, damaged, skipping):
    folder, bad = damaged
    names = [index_of(folder).name(sample) for sample in bad]
    assert skipping["few"]["code"] == 0, skipping["few"]["errors"]
    assert all(skipping["few"]["errors"].count(f"skipped {name}") == 2 for name in names)
    rows, skipped = memory_of_variant(base.parent / "few", folder), np.isin(index_of(folder).ids(), bad)
    np.testing.assert_array_equal(rows["last_epoch"], np.where(skipped, -1, 1))
    assert set(rows.scores[skipped].flatten().tolist()) == {0.0, 1.0}
    assert skipping["many"]["code"] == 2, skipping["many"]["errors"]
    complaint = skipping["many"]["errors"].split("bigscl.train: ")[1]
    assert "of 24 samples could not be read" in complaint
    assert any(name in complaint for name in names)


def test_run_that_skipped_pictures_resumes_in_mid_epoch_bit_for_bit(tmp_path, base, damaged, skipping):
    """What was skipped is not tried again, and what is skipped later counts as a share of the whole epoch."""
    (folder, bad), once = damaged, base.parent / "few"
    again = copy_run(once, tmp_path / "again")
    _, middle, _ = sorted((again / "checkpoints").iterdir())
    call = [base, "--data.train", folder / "train-*.tar", *ALLOWED, "--run", again, "--resume", middle]
    resumed = call_all({"again": call})["again"]
    assert resumed["code"] == 0, resumed["errors"]
    counts = [resumed["errors"].count(f"skipped {index_of(folder).name(sample)}") for sample in bad]
    assert counts == [0, 1, 1]
    assert_same_weights(weights_of(again), weights_of(once))
    assert_same_rows(memory_of_variant(again, folder), memory_of_variant(once, folder))


@pytest.mark.parametrize("processes", [1, 2])
def test_network_computes_in_the_wanted_precision_after_the_warmup_too(tmp_path, base, processes):
    """Accelerate does not prepare a network twice; the phase after the warm-up needs it again."""
    settings = {"model.backbone": "tests.integration.tiny:telling_net", "hardware.precision": "bf16"}
    done = train(base, "--run", tmp_path / "run", *dotted(**settings), processes=processes)
    if "bf16 does not work on this CPU" in done.stderr:
        pytest.skip("bf16 does not work on this CPU")
    # Lines of two ranks may mix.
    assert "torch.bfloat16" in done.stdout
    assert "float32" not in done.stdout
