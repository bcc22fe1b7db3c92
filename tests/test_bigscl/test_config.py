"""Configs: strict, complete, and every mistake reported at once."""

import math
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from bigscl.config import (
    Config,
    ConfigError,
    changed_settings,
    doubtful_settings,
    load_config,
    load_data_settings,
    make_config,
    to_yaml,
    with_digest,
)
from bigscl.config.print_config import all_settings, commented_yaml, settings_page

CONFIGS = sorted((Path(__file__).parents[2] / "configs").glob("*.yaml"))


def values(**sections):
    base = {"run": "runs/x", "data": {"train": "t", "val": "v"}, "model": {"backbone": "resnet18"}}
    for name, settings in sections.items():
        base[name] = {**base.get(name, {}), **settings} if isinstance(settings, dict) else settings
    return base


def complaints(**sections):
    with pytest.raises(ConfigError) as caught:
        make_config(values(**sections))
    _, *lines = str(caught.value).splitlines()
    return [line.strip() for line in lines]


def test_every_mistake_is_listed_with_its_dotted_path():
    found = complaints(
        data={"batch_size": 0, "batch_sice": 3, "crop": {"scale": [1, 2, 3]}},
        objective={"base": "enn"},
        selection={"K": -1},
        schedule={"main": {"epochs": 1}},
    )
    assert [line.split(":")[0] for line in found] == [
        "data.batch_size",
        "data.crop.scale",
        "data.batch_sice",
        "objective.base",
        "selection.K",
        "schedule.main.learning_rate",
    ]
    assert "data.batch_sice: no such setting; did you mean data.batch_size?" in found
    assert "schedule.main.learning_rate: missing" in found
    assert any("'enn'" in line and "'en'" in line for line in found)


NO_MEMORY = {"base": "an", "consistency": "none"}


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"store": {"kind": "none"}}, "store.kind"),
        ({"store": {"kind": "ram", "url": "x"}}, "store.url"),
        ({"objective": NO_MEMORY, "store": {"kind": "none", "url": "x"}}, "store.url"),
        ({"objective": NO_MEMORY, "store": {"kind": "none", "codec": "zstd"}}, "store.codec"),
        ({"objective": NO_MEMORY, "store": {"kind": "none", "checksum": False}}, "store.checksum"),
        ({"objective": {"consistency": "none", "norm": "l2"}}, "objective.norm"),
        ({"objective": {"smoothing": 0.3}}, "objective.smoothing"),
        ({"data": {"val": None}, "objective": {"base": "epr"}}, "selection.K"),
        ({"store": {"compact_after": 3}}, "store.compact_after"),
        ({"store": {"warmup_heatmaps": "scores"}}, "store.warmup_heatmaps"),
        ({"store": {"url": "here", "endpoint": "http://x"}}, "store.endpoint"),
        ({"data": {"labels": "full", "given": {"seed": 1}}}, "data.given"),
        ({"data": {"color_jitter": {"hue": 0.1}, "rand_augment": {}}}, "data.rand_augment"),
        ({"data": {"resize": "square", "shorter": 300}}, "data.shorter"),
        ({"data": {"eval_size": 288, "shorter": 256}}, "data.shorter"),
        (
            {
                "schedule": {
                    "main": {"epochs": 1, "learning_rate": 1, "decay": "constant", "final_learning_rate": 0.1}
                }
            },
            "schedule.main.final_learning_rate",
        ),
        (
            {"model": {"freeze_statistics": True}, "hardware": {"sync_batchnorm": True}},
            "hardware.sync_batchnorm",
        ),
        ({"checkpoint": {"keep": 3}}, "checkpoint.keep"),
        ({"checkpoint": {"keep": 2, "every_epochs": 2}}, "checkpoint.keep"),
        ({"checkpoint": {"every_epochs": 2}, "store": {"slots": 2}}, "checkpoint.keep"),
        ({"data": {"crop": {"scale": [0.9, 0.1]}}}, "data.crop.scale"),
        ({"data": {"crop": {"scale": [0.5, 1.5]}}}, "data.crop.scale"),
        ({"objective": {"base": "epr"}, "optimizer": {"accumulate": 2}}, "optimizer.accumulate"),
        ({"objective": {"base": "ll_r"}, "optimizer": {"accumulate": 2}}, "optimizer.accumulate"),
        ({"objective": {"base": "crisp"}, "optimizer": {"accumulate": 2}}, "optimizer.accumulate"),
        ({"objective": {"hill": {"margin": 0.5}}}, "objective.hill"),
        ({"objective": {"base": "ll_ct", "em_apl": {"alpha": 0.5}}}, "objective.em_apl"),
        ({"objective": {"base": "em_apl", "consistency": "none"}, "store": {"kind": "none"}}, "store.kind"),
        ({"objective": {"base": "em_apl", "em_apl": {"start_epoch": 900}}}, "objective.em_apl.start_epoch"),
        ({"objective": {"base": "crisp", "crisp": {"start_epoch": 900}}}, "objective.crisp.start_epoch"),
        ({"objective": {"base": "splc", "splc": {"start_epoch": 900}}}, "objective.splc.start_epoch"),
    ],
)
def test_settings_that_contradict_or_have_no_effect_are_refused(sections, path):
    assert [line.split(":")[0] for line in complaints(**sections)] == [path]


@pytest.mark.parametrize(
    ("sections", "path"),
    [
        ({"objective": {"base": "hinge"}}, "objective.base"),
        ({"objective": {"base": "gr", "gr": {"center": [0.5]}}}, "objective.gr.center.1"),
        ({"objective": {"base": "hill", "hill": {"lambda": 1.5}}}, "objective.hill.lambda"),
        ({"objective": {"base": "splc", "splc": {"threshold": math.nan}}}, "objective.splc.threshold"),
        ({"objective": {"consistency": "spatial"}}, "objective.consistency"),
        ({"objective": {"norm": "l1"}}, "objective.norm"),
        ({"objective": {"smoothing": 1.5}}, "objective.smoothing"),
        ({"objective": {"gamma": {"peak": -1}}}, "objective.gamma.peak"),
        ({"objective": {"gamma": {"epochs": math.nan}}}, "objective.gamma.epochs"),
        ({"objective": {"gamma": {"start_epoch": math.inf}}}, "objective.gamma.start_epoch"),
        ({"objective": {"gamma": {"end": 3}}}, "objective.gamma.end"),
        ({"data": {"size": 100_000}}, "data.size"),
        ({"data": {"eval_size": 100_000}}, "data.eval_size"),
        ({"data": {"crop": {"scale": [0.0, 1.0]}}}, "data.crop.scale.0"),
        ({"data": {"crop": {"ratio": [2.0, 1.0]}}}, "data.crop.ratio"),
        ({"data": {"crop": {"flip": 2}}}, "data.crop.flip"),
        ({"data": {"rand_augment": {"magnitude": 31}}}, "data.rand_augment.magnitude"),
        ({"data": {"color_jitter": {"hue": 0.6}}}, "data.color_jitter.hue"),
        ({"data": {"erase": {"probability": -0.1}}}, "data.erase.probability"),
        ({"data": {"erase": {"color": [1, 2, 3]}}}, "data.erase.color"),
        ({"schedule": {"main": {"epochs": 1, "learning_rate": math.nan}}}, "schedule.main.learning_rate"),
        ({"schedule": {"main": {"epochs": 1, "learning_rate": 1, "trains": "head"}}}, "schedule.main.trains"),
        ({"log": {"trackers": ["nosuch"]}}, "log.trackers.0"),
        ({"schedule": {"last": {"epochs": 1, "learning_rate": 1}}}, "schedule.last"),
    ],
)
def test_values_out_of_their_bounds_are_refused(sections, path):
    assert [line.split(":")[0] for line in complaints(**sections)] == [path]


def test_top_classes_without_warmup_must_say_when_they_are_chosen():
    without = {"warmup": {"epochs": 0, "learning_rate": 1}}
    found = complaints(store={"top": 10}, schedule=without)
    assert found[0].startswith("store.compact_after: needed")
    config = make_config(values(store={"top": 10, "compact_after": 3}, schedule=without))
    assert config.compact_after == 3
    assert make_config(values(store={"top": 10})).compact_after == 5


def test_overrides_reach_any_depth_and_keep_the_rest(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text(yaml.safe_dump(values(optimizer={"weight_decay": 0.1})))
    overrides = [
        "--data.crop.flip",
        "0",
        "--optimizer.name=sgd",
        "--schedule.main",
        "{epochs: 2, learning_rate: 1e-3}",
    ]
    config = load_config(path, overrides)
    assert (config.data.crop.flip, config.optimizer.name, config.optimizer.weight_decay) == (0, "sgd", 0.1)
    assert config.schedule.main.learning_rate == 1e-3, "PyYAML reads 1e-3 as a string"


@pytest.mark.parametrize(
    ("text", "overrides", "complaint"),
    [
        ("{a: [", [], "cannot be read"),
        ("3", [], "expected sections"),
        ("{}", ["data.train"], "expected --section.key value"),
        ("{}", ["--data.train"], "expected a value after it"),
    ],
)
def test_what_is_no_config_is_said_in_one_line(tmp_path, text, overrides, complaint):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=complaint):
        load_config(path, overrides)
    with pytest.raises(ConfigError, match="cannot be read"):
        load_config(tmp_path / "nowhere.yaml")


def test_the_resolved_config_loads_again_as_the_same():
    config = make_config(values(data={"erase": {}, "given": {"seed": 3}}, weight_ema=0.99))
    again = make_config(yaml.safe_load(to_yaml(config)))
    assert again == config
    assert isinstance(again, Config)


def test_every_setting_has_a_sentence_below_it():
    for setting in all_settings():
        assert setting.text.endswith("."), setting.path


def test_the_reference_page_is_that_of_today():
    """Write it again with `python -m bigscl.config.print_config > docs/settings.md`."""
    assert (CONFIGS[0].parents[1] / "docs" / "settings.md").read_text() == settings_page()


def test_the_reference_has_the_defaults_that_the_reader_gives_to_a_section_of_one_setting():
    found = {one.path: one.default for one in all_settings()}
    for phase in ("warmup", "main"):
        needed = {"epochs": 3} if phase == "warmup" else {"epochs": 3, "learning_rate": 0.1}
        read = asdict(make_config(values(schedule={phase: needed}))).get("schedule")[phase]
        for name, value in read.items():
            if name not in needed:
                assert yaml.safe_load(found[f"schedule.{phase}.{name}"]) == value, name
            assert (found[f"schedule.{phase}.{name}"] is None) == (phase == "main" and name in needed)


def test_a_run_without_warmup_needs_no_learning_rate_of_it():
    config = make_config(values(schedule={"warmup": {"epochs": 0}}))
    assert (config.schedule.epochs, config.schedule.main.epochs) == (25, 25)


def test_repeated_augmentation_is_refused_with_the_reason():
    (found,) = complaints(data={"repeated_augmentation": 3})
    assert found.startswith("data.repeated_augmentation: no such setting: the memory updates each image once")
    (found,) = complaints(data={"rand_augment": {"operations": ["rotate"]}})
    assert found.startswith("data.rand_augment: ")
    assert "rotate moves pixels, and the heatmaps of the memory follow crops and flips only" in found


def test_the_reference_has_every_setting_with_its_default():
    found = {one.path: one for one in all_settings()}
    optional = {"data.given", "data.color_jitter", "data.rand_augment", "data.erase"}
    everything = values(data={name.split(".")[1]: {} for name in optional} | {"given": {"seed": 1}})
    del everything["data"]["rand_augment"]  # it excludes colour jitter
    for path in flattened(yaml.safe_load(to_yaml(make_config(everything)))):
        assert path in found
    assert (found["run"].default, found["store.slots"].default) == (None, "3")
    assert (found["schedule.warmup.epochs"].default, found["schedule.main.epochs"].default) == ("5", None)
    assert found["schedule.main"].default == "epochs: 25, learning_rate: 1.0e-05"
    assert found["selection.K"].kind == "number, at least 1 or `auto`"
    assert found["data.batch_size"].kind == "integer, at least 1"
    assert found["data.given.seed"].default is None


def flattened(sections, prefix=""):
    for name, value in sections.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def test_a_config_printed_with_comments_loads_again_as_the_same(tmp_path):
    config = make_config(values(data={"erase": {}, "given": {"seed": 3}, "val": "a: b # c"}, weight_ema=0.99))
    text = commented_yaml(config)
    (tmp_path / "c.yaml").write_text(text)
    assert load_config(tmp_path / "c.yaml") == config
    assert "  # Images per process and step.\n  batch_size: 64\n" in text


def test_data_settings_of_a_run_are_read_even_if_other_sections_are_damaged(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text("model: 3\ndata: {train: t, given: {seed: 7}, setting_of_tomorrow: 1}")
    data = load_data_settings(path)
    assert (data.train, data.given.seed, data.given.positives) == ("t", 7, 1)
    for damaged in ("", "data: 3", "data: {train: [1]}", "data: {train: t, given: {}}", "data: ["):
        path.write_text(damaged)
        with pytest.raises(ConfigError, match=r"config\.yaml"):
            load_data_settings(path)


def test_changed_settings_are_named_even_if_another_section_has_the_same_line(tmp_path):
    phases = {"warmup": {"epochs": 4, "learning_rate": 0.1}, "main": {"epochs": 5, "learning_rate": 0.1}}
    saved = tmp_path / "config.yaml"
    saved.write_text(to_yaml(make_config(values(schedule=phases, data={"given": {"seed": 3}}))))
    assert changed_settings(saved, make_config(values(schedule=phases, data={"given": {"seed": 3}}))) == []
    phases["warmup"]["epochs"] = 5
    changed = changed_settings(saved, make_config(values(schedule=phases)))
    assert "schedule.warmup.epochs: 5" in changed
    assert "data.given.seed: None" in changed
    assert changed_settings(tmp_path / "nowhere.yaml", make_config(values())) == []


def test_settings_that_an_earlier_revision_lacked_have_not_changed(tmp_path):
    config = make_config(values())
    saved = yaml.safe_load(to_yaml(config))
    del saved["data"]["preprocessing"], saved["data"]["interpolation"], saved["model"]["args"]
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(saved))
    assert changed_settings(tmp_path / "config.yaml", config) == []
    other = make_config(
        values(data={"interpolation": "bicubic"}, model={"args": {"zero_init_residual": True}})
    )
    assert changed_settings(tmp_path / "config.yaml", other) == [
        "data.interpolation: bicubic",
        "model.args.zero_init_residual: True",
    ]


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_shipped_configs_are_valid_and_open_with_what_one_must_know(path):
    config = load_config(path)
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    for word in ("command:", "machine:", "duration:", "expected:"):
        assert any(word in line for line in head), f"{path.name} says nothing of its {word}"
    assert f"configs/{path.name}" in "\n".join(head)
    assert config.run.name in (path.stem, path.stem.removeprefix("quickstart_"))


def test_the_papers_hyper_parameters_are_in_its_configs():
    root = CONFIGS[0].parent
    coco = load_config(root / "coco14_resnet50_scl.yaml")
    assert (coco.selection.K, coco.data.size, coco.data.batch_size, coco.store.momentum) == (2.9, 448, 8, 0.8)
    assert (coco.schedule.warmup.epochs, coco.schedule.main.epochs) == (5, 25)
    assert coco.schedule.main.learning_rate == 1e-5
    assert (coco.data.crop.scale, coco.data.crop.squash) == ((0.25, 1.0), True)
    scratch = load_config(root / "voc12_resnet50_scratch_scl.yaml")
    assert (scratch.selection.K, scratch.schedule.warmup.epochs, scratch.schedule.main.epochs) == (
        1.5,
        0,
        100,
    )
    imagenet = load_config(root / "imagenet_resnet50_scl.yaml")
    assert (imagenet.store.top, imagenet.optimizer.weight_decay, imagenet.compact_after) == (10, 1e-4, 5)


@pytest.mark.parametrize(
    ("settings", "shorter"),
    [({}, 256), ({"size": 64}, 74), ({"eval_size": 448}, 512), ({"size": 64, "shorter": 80}, 80)],
)
def test_the_evaluated_centre_is_as_large_a_part_at_every_size(settings, shorter):
    config = make_config(values(data=settings))
    assert config.data.evaluation_transform().shorter == shorter
    assert f"shorter: {shorter}\n" in to_yaml(config)
    assert list(doubtful_settings(config)) == []


def test_a_config_that_was_saved_before_the_default_followed_the_size_is_unchanged(tmp_path):
    for settings in ({}, {"resize": "square", "size": 64}):
        saved = tmp_path / "config.yaml"
        saved.write_text(to_yaml(make_config(values(data={**settings, "shorter": 256}))))
        assert changed_settings(saved, make_config(values(data=settings))) == []


def test_a_tiny_centre_is_doubted():
    (doubt,) = doubtful_settings(make_config(values(data={"size": 64, "shorter": 256})))
    assert "central 64 of 256 pixels, at most 6% of an image" in doubt
    assert "(74 then)" in doubt
    square = make_config(values(data={"size": 64, "shorter": 256, "resize": "square"}))
    assert list(doubtful_settings(square)) == []


@pytest.mark.parametrize("number", [0, 0.99, -1])
def test_fewer_positives_per_image_than_the_annotated_one_are_refused(number):
    expected = f"selection.K: {number}: input should be greater than or equal to 1 or 'auto'"
    assert complaints(selection={"K": number}) == [expected]
    assert make_config(values(selection={"K": 1})).selection.K == 1


@pytest.mark.parametrize(
    ("backbone", "complaint"),
    [
        ("resnet19", "torchvision has no classification network 'resnet19'"),
        ("timm:resnet19", "timm has no network 'resnet19'"),
        ("os:system", "os:system takes no num_classes"),
        ("nosuch.module:network", "cannot import 'nosuch.module:network'"),
    ],
)
def test_the_network_is_among_all_mistakes_of_a_config_to_train(backbone, complaint):
    wrong = values(model={"backbone": backbone}, data={"size": 100_000})
    with pytest.raises(ConfigError) as caught:
        make_config(wrong, to_train=True)
    first, size, network = str(caught.value).splitlines()
    assert (first, size.split(":")[0].strip()) == ("config: 2 mistakes", "data.size")
    assert network.strip().startswith(f"model.backbone: {complaint}")


def test_a_tracker_that_is_not_installed_is_refused_where_it_would_track(monkeypatch):
    monkeypatch.setattr("accelerate.tracking._available_trackers", ["tensorboard"])
    config = values(log={"trackers": ["tensorboard", "wandb"]})
    assert make_config(config).log.trackers == ("tensorboard", "wandb")
    with pytest.raises(ConfigError, match=r"1 mistake\n  log.trackers: wandb is not installed"):
        make_config(config, to_train=True)
    make_config(values(log={"trackers": ["tensorboard"]}), to_train=True)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [])
    with pytest.raises(ConfigError, match=r"log.trackers: tensorboard is not installed"):
        make_config(values(), to_train=True)


# The digest of a saved config


def test_damaged_or_edited_config_of_a_run_is_refused_until_its_first_line_is_removed(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(with_digest(to_yaml(make_config({**values(), "seed": 1}))))
    assert load_config(path).seed == 1
    path.write_text(path.read_text().replace("seed: 1", "seed: 3"))
    for read in (load_config, load_data_settings):
        with pytest.raises(ConfigError, match=r"config\.yaml: damaged or edited: .*remove that line"):
            read(path)
    path.write_text(path.read_text().partition("\n")[2])
    assert load_config(path).seed == 3
