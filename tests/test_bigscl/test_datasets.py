"""Datasets as they are downloaded, and what their shards hold."""

import io
import json
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bigscl.datasets.folder import FlatLabels, folder, read_synsets
from bigscl.datasets.multilabel import (
    VOC_CLASSES,
    BoxedImage,
    Protocol,
    coco,
    draw_given,
    multi_label_shards,
    split,
    voc,
)
from bigscl.datasets.writer import ImageFile, Resize, key_of
from tests.devkits import jpeg, make_coco, make_imagenet, make_voc, write_file

REAL_VOC = Path(__file__).parents[3] / "shared" / "data" / "voc2012"
ONE_POSITIVE = Protocol(num_positives=1, num_negatives=0, seed=1200)


def read_voc(source, year=2012, protocol=ONE_POSITIVE):
    return replace(voc(source, year=year, protocol=protocol), samples_per_shard=3)


def read_coco(source, year=2014):
    return replace(coco(source, year=year, protocol=ONE_POSITIVE), samples_per_shard=3)


def read_folder(source, samples_per_shard=3, **changes):
    fields = {"splits": [], "flat": None, "resize": None, "seed": 0}
    return replace(folder(source, **{**fields, **changes}), samples_per_shard=samples_per_shard)


def keys(samples):
    return [sample.key for sample in samples]


# VOC


@pytest.fixture
def devkit(tmp_path):
    """Ten training images, two of them with difficult objects only or partly, and one test image."""
    names = [f"2008_{number:06d}" for number in (9, 1, 30, 4, 7, 12, 2, 25, 11, 40)]
    images = {
        name: [("dog", 0, 5, 4, 20, 15), (VOC_CLASSES[number], 0, 21, 1, 40, 30)]
        for number, name in enumerate(names)
    }
    images["2008_000004"] = [("cat", 1, 1, 1, 9, 9)]
    images["2008_000007"] = [("cat", 1, 1, 1, 9, 9), ("person", 0, 11, 7, 30, 30)]
    images["2009_000001"] = [("sofa", 0, 1, 1, 40, 30)]
    root = tmp_path / "VOCdevkit" / "VOC2012"
    make_voc(root, images, {"train": names, "val": ["2009_000001"]})
    return root


def test_voc_parts_follow_the_protocol_in_file_name_order(devkit):
    parts = read_voc(devkit).parts
    everyone = sorted(path.stem for path in (devkit / "JPEGImages").iterdir())
    official = [name for name in everyone if name not in ("2008_000004", "2009_000001")]
    training, validation = split(len(official))
    assert keys(parts["train"]) == [official[row] for row in training]
    assert keys(parts["val"]) == [official[row] for row in validation]
    assert keys(parts["test"]) == ["2009_000001"]

    labels = {sample.key: sample.label.full for part in ("train", "val") for sample in parts[part]}
    matrix = np.zeros((len(official), 20), dtype=bool)
    for row, name in enumerate(official):
        matrix[row, list(labels[name])] = True
    expected, _ = draw_given(matrix)
    given = {sample.key: sample.label.given for part in ("train", "val") for sample in parts[part]}
    assert [given[name] for name in official] == expected


def test_voc_difficult_objects_are_dropped_and_boxes_are_fractions(devkit):
    samples = {sample.key: sample for part in read_voc(devkit).parts.values() for sample in part}
    label = samples["2008_000007"].label
    assert label.full == label.given == (VOC_CLASSES.index("person"),)
    assert label.boxes == ((14, 10 / 40, 6 / 30, 30 / 40, 1.0),)
    assert samples["2009_000001"].label.boxes == ((VOC_CLASSES.index("sofa"), 0.0, 0.0, 1.0, 1.0),)


def test_voc_images_are_the_original_bytes(devkit):
    for samples in read_voc(devkit).parts.values():
        for sample in samples:
            assert sample.image.encoded() == (
                "jpg",
                (devkit / "JPEGImages" / f"{sample.key}.jpg").read_bytes(),
            )


def real_labels(part):
    """key -> content of the json member, of all real VOC-2012 shards of a part."""
    found = {}
    for path in sorted(REAL_VOC.glob(f"{part}-*.tar")):
        with tarfile.open(path) as tar:
            members = [member for member in tar if member.name.endswith(".json")]
            found |= {member.name.removesuffix(".json"): tar.extractfile(member).read() for member in members}
    return found


@pytest.mark.skipif(not REAL_VOC.exists(), reason="real VOC-2012 shards are not here")
def test_labels_of_real_voc_shards_are_reproduced_byte_for_byte():
    real = {part: real_labels(part) for part in ("train", "val")}
    images = [
        BoxedImage(path=Path(f"{key}.jpg"), boxes=tuple(tuple(box) for box in json.loads(label)["boxes"]))
        for key, label in sorted((real["train"] | real["val"]).items())
    ]
    made = multi_label_shards("voc", VOC_CLASSES, images, images[:1], ONE_POSITIVE)
    for part in ("train", "val"):
        written = {sample.key: json.loads(json.dumps(sample.label.fields())) for sample in made.parts[part]}
        # These shards have the names of earlier revisions.
        expected = {key: json.loads(label) for key, label in real[part].items()}
        for label in expected.values():
            label["full"], label["given"] = label.pop("labels"), label.pop("observed")
        assert written == expected
        assert keys(made.parts[part]) == list(real[part])


@pytest.mark.parametrize("levels", [0, 1, 2])
def test_voc_devkit_is_found_from_any_of_its_folders(devkit, levels):
    source = [devkit, devkit.parent, devkit.parent.parent][levels]
    assert len(read_voc(source).parts["test"]) == 1


def test_voc_keeps_more_labels_where_told(devkit):
    protocol = Protocol(num_positives=2, num_negatives=3, seed=1200)
    for sample in read_voc(devkit, protocol=protocol).parts["train"]:
        assert sample.label.given == sample.label.full
        assert len(sample.label.negatives) == 3
        assert not set(sample.label.negatives) & set(sample.label.full)


def test_voc_mistakes_are_named(devkit, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a VOCdevkit folder"):
        read_voc(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match="no folder Annotations in it, nor in VOC2007"):
        read_voc(tmp_path, year=2007)
    write_file(devkit / "Annotations" / "2009_000001.xml", "<annotation><size>")
    with pytest.raises(ValueError, match=r"2009_000001.xml: not well-formed XML"):
        read_voc(devkit)
    write_file(
        devkit / "Annotations" / "2009_000001.xml",
        "<annotation><size><width>wide</width></size></annotation>",
    )
    with pytest.raises(ValueError, match=r"2009_000001.xml: size/width is 'wide', expected a number"):
        read_voc(devkit)
    (devkit / "JPEGImages" / "2008_000001.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"2008_000001.jpg: not there, expected a listed image"):
        read_voc(devkit)
    write_file(
        devkit / "Annotations" / "2008_000001.xml",
        (devkit / "Annotations" / "2008_000002.xml").read_text().replace("dog", "unicorn"),
    )
    with pytest.raises(ValueError, match="'unicorn' is none of the 20 VOC classes"):
        read_voc(devkit)


# COCO


@pytest.fixture
def coco_folder(tmp_path):
    """Ids whose order as strings is not their order as numbers, one image without objects."""
    train = {
        9: [(3, 0, 0, 20, 15)],
        10: [(1, 10, 3, 20, 30), (3, 0, 0, 40, 30)],
        100: [(90, 1, 1, 2, 2)],
        11: [],
    }
    val = {5: [(1, 4, 3, 8, 6), (1, 0, 0, 4, 3)]}
    make_coco(tmp_path, {"train2014": train, "val2014": val}, [(1, "person"), (3, "car"), (90, "toothbrush")])
    return tmp_path


def test_coco_images_are_sorted_by_id_as_string_and_empty_ones_left_out(coco_folder):
    shards = read_coco(coco_folder)
    official = [f"COCO_train2014_{number:012d}" for number in (10, 100, 9)]
    training, validation = split(3)
    assert keys(shards.parts["train"]) == [official[row] for row in training]
    assert keys(shards.parts["val"]) == [official[row] for row in validation]
    assert keys(shards.parts["test"]) == ["COCO_val2014_000000000005"]
    assert shards.classes == ["person", "car", "toothbrush"]


def test_coco_labels_count_in_category_order_and_boxes_stay_in_the_image(coco_folder):
    samples = {
        sample.key[-3:]: sample.label for part in read_coco(coco_folder).parts.values() for sample in part
    }
    assert samples["010"].full == (0, 1)
    assert samples["010"].boxes == ((0, 0.25, 0.1, 0.75, 1.0), (1, 0.0, 0.0, 1.0, 1.0))
    assert samples["100"].full == (2,)
    assert samples["005"].full == (0,)
    assert len(samples["005"].boxes) == 2


def test_coco_mistakes_are_named(coco_folder):
    with pytest.raises(FileNotFoundError, match=r"instances_train2017.json: not there"):
        read_coco(coco_folder, year=2017)
    with pytest.raises(ValueError, match="a file, expected a folder with annotations"):
        read_coco(coco_folder / "annotations" / "instances_train2014.json")
    instances = coco_folder / "annotations" / "instances_val2014.json"
    good = instances.read_text()
    for bad, message in [
        (good[:-9], "instances_val2014.json: not well-formed JSON"),
        (
            good.replace('"categories"', '"captions"'),
            "instances_val2014.json: 'categories' is used but missing",
        ),
        (good.replace('"category_id": 1', '"category_id": 2'), "2 is used but missing"),
        (good.replace("toothbrush", "toothpick"), "the categories of train2014 and val2014 differ"),
    ]:
        instances.write_text(bad)
        with pytest.raises(ValueError, match=message):
            read_coco(coco_folder)
    instances.write_text(good)
    (coco_folder / "train2014" / "COCO_train2014_000000000009.jpg").unlink()
    with pytest.raises(FileNotFoundError, match=r"000000000009.jpg: not there, expected an image named in"):
        read_coco(coco_folder)


# Folders


def test_imagenet_folders_give_public_keys_and_sorted_classes(tmp_path):
    classes = make_imagenet(tmp_path)
    shards = read_folder(tmp_path)
    assert shards.classes == classes
    expected = {f"{name}_{i + 10}": number for number, name in enumerate(classes) for i in range(4)}
    assert {sample.key: sample.label for sample in shards.parts["train"]} == expected
    assert [(sample.key, sample.label) for sample in shards.parts["val"]] == [
        (f"ILSVRC2012_val_{i + 1:08d}", i % 3) for i in range(6)
    ]
    first = shards.parts["val"][0]
    assert first.image.encoded() == ("jpg", jpeg(1000))


def test_training_samples_are_shuffled_by_the_seed_and_others_sorted(tmp_path):
    make_imagenet(tmp_path, per_class=20)
    shards = read_folder(tmp_path, samples_per_shard=10)
    assert len({sample.label for sample in shards.chunk("train", 0)}) == 3
    assert keys(shards.parts["train"]) == keys(read_folder(tmp_path).parts["train"])
    assert keys(shards.parts["train"]) != keys(read_folder(tmp_path, seed=1).parts["train"])
    assert keys(shards.parts["val"]) == sorted(keys(shards.parts["val"]))


def test_a_folder_of_classes_is_the_training_part(tmp_path):
    for name in ("train", "bus"):  # a class may be called like a split
        write_file(tmp_path / name / "one.jpg", jpeg(0))
    shards = read_folder(tmp_path)
    assert shards.classes == ["bus", "train"]
    assert list(shards.parts) == ["train"]


def test_file_names_that_repeat_get_their_class_in_front(tmp_path):
    for name in ("cat", "dog.big"):
        write_file(tmp_path / name / "sub" / "0.1.jpg", jpeg(0))
    assert sorted(keys(read_folder(tmp_path).parts["train"])) == ["cat_sub_0_1", "dog_big_sub_0_1"]


@pytest.fixture
def flat(tmp_path):
    make_imagenet(tmp_path, flat_val=True)
    # The devkit's numbers: 3, 1, 2 stand for the first, second, third class in sorted order.
    write_file(tmp_path / "truth.txt", "3\n1\n2\n3\n1\n2\n")
    write_file(tmp_path / "synsets.txt", "n01443537 goldfish\nn01484850 great white shark\nn01440764 tench\n")
    return tmp_path


@pytest.mark.parametrize(
    ("truth", "numbered"),
    [
        ("3\n1\n2\n3\n1\n2\n", True),
        ("2\n0\n1\n2\n0\n1\n", True),
        ("n01440764\nn01443537\nn01484850\n" * 2, False),
        ("".join(f"ILSVRC2012_val_{6 - i:08d}.JPEG {(7 - i) % 3}\n" for i in range(6)), True),
        (
            "ImageId,PredictionString\n"
            + "".join(
                f"ILSVRC2012_val_{i + 1:08d},{name} 1 2 3 4\n"
                for i, name in reversed(list(enumerate(["n01440764", "n01443537", "n01484850"] * 2)))
            ),
            False,
        ),
    ],
    ids=["devkit", "from zero", "names", "by image", "kaggle"],
)
def test_flat_validation_images_get_their_labels_from_the_ground_truth(flat, truth, numbered):
    write_file(flat / "truth.txt", truth)
    labels = FlatLabels(ground_truth=flat / "truth.txt", synsets=flat / "synsets.txt" if numbered else None)
    found = [(sample.key, sample.label) for sample in read_folder(flat, flat=labels).parts["val"]]
    assert found == [(f"ILSVRC2012_val_{i + 1:08d}", i % 3) for i in range(6)]


def test_synsets_come_from_the_devkits_own_file(tmp_path):
    savemat = pytest.importorskip("scipy.io").savemat
    kinds = [("ILSVRC2012_ID", "i4"), ("WNID", "O"), ("num_children", "i4")]
    rows = [(2, "n01484850", 0), (1, "n01443537", 0), (1001, "n00001740", 2), (3, "n01440764", 0)]
    savemat(tmp_path / "meta.mat", {"synsets": np.array(rows, dtype=kinds)})
    assert read_synsets(tmp_path / "meta.mat") == ["n01443537", "n01484850", "n01440764"]


@pytest.mark.parametrize(
    ("truth", "synsets", "message"),
    [
        ("3\n1\n2\n3\n1\n2\n", None, "classes are numbers, and their order is not"),
        ("3\n1\n2\n3\n1\n4\n", "synsets.txt", "has class 4, but .* names only 3"),
        ("3\n1\n2\n", "synsets.txt", "3 lines for the 6 images"),
        ("", None, "empty"),
        ("n1\n" * 6, None, "1 classes are not among the 3 of the training folder, e.g. 'n1'"),
        ("n1\n" * 6, "synsets.txt", "has no effect: remove it"),
        ("a n1\nb\n", None, "row 2 is 'b'"),
        ("a n1\n", None, "6 images of .* have no line, e.g. ILSVRC2012_val_00000001"),
    ],
)
def test_ground_truth_that_does_not_fit_is_refused(flat, truth, synsets, message):
    write_file(flat / "truth.txt", truth)
    labels = FlatLabels(ground_truth=flat / "truth.txt", synsets=flat / synsets if synsets else None)
    with pytest.raises(ValueError, match=message):
        read_folder(flat, flat=labels)


def test_folder_mistakes_are_named(flat, tmp_path):
    with pytest.raises(FileNotFoundError, match="expected a folder of images"):
        read_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="no split test, found train, val"):
        read_folder(flat, splits=["test"])
    with pytest.raises(ValueError, match="6 images without class folders"):
        read_folder(flat)
    labels = FlatLabels(ground_truth=flat / "truth.txt", synsets=None)
    with pytest.raises(ValueError, match="has class folders: remove it"):
        read_folder(flat, splits=["train"], flat=labels)
    (flat / "train" / "n02000000").mkdir()
    with pytest.raises(ValueError, match="n02000000: no images"):
        read_folder(flat, splits=["train"])
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no class folders"):
        read_folder(tmp_path / "empty")


# Image files


def encoded(tmp_path, content, name="x.jpg", resize=None):
    write_file(tmp_path / name, content)
    return ImageFile(path=str(tmp_path / name), resize=resize).encoded()


def picture(format_name, mode="RGB", **options):
    buffer = io.BytesIO()
    Image.open(io.BytesIO(jpeg(3))).convert(mode).save(buffer, format=format_name, **options)
    return buffer.getvalue()


@pytest.mark.parametrize(("format_name", "extension"), [("JPEG", "jpg"), ("PNG", "png"), ("WEBP", "webp")])
def test_extension_follows_the_content_and_bytes_stay(tmp_path, format_name, extension):
    content = picture(format_name)
    assert encoded(tmp_path, content, name="n02105855_2933.JPEG") == (extension, content)


@pytest.mark.parametrize("resize", [None, Resize(size=16, mode="square")])
@pytest.mark.parametrize("content", [b"", b"not an image", jpeg(1)[:200]], ids=["empty", "text", "cut off"])
def test_unreadable_files_are_kept_for_the_pipeline_to_count(tmp_path, content, resize):
    assert encoded(tmp_path, content, resize=resize) == ("jpg", content)


@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_resizing_squashes_to_a_square(tmp_path, mode):
    extension, content = encoded(tmp_path, jpeg(0, 64, 48, mode), resize=Resize(size=16, mode="square"))
    small = Image.open(io.BytesIO(content))
    assert (extension, small.format, small.mode, small.size) == ("jpg", "JPEG", "RGB", (16, 16))
    expected = np.asarray(
        Image.open(io.BytesIO(jpeg(0, 64, 48, mode))).convert("RGB").resize((16, 16)), dtype=int
    )
    assert np.abs(np.asarray(small, dtype=int) - expected).mean() < 5


@pytest.mark.parametrize(("side", "expected"), [(24, (32, 24)), (48, (64, 48)), (500, (64, 48))])
def test_shrinking_keeps_the_aspect_and_never_enlarges(side, expected):
    assert Resize(size=side, mode="short").target(64, 48) == expected
    assert Resize(size=side, mode="short").target(48, 64) == expected[::-1]


def test_resizing_keeps_the_orientation_tag(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    _, content = encoded(tmp_path, picture("JPEG", exif=exif), resize=Resize(size=16, mode="short"))
    assert Image.open(io.BytesIO(content)).getexif()[0x0112] == 6


@pytest.mark.parametrize(
    ("name", "key"),
    [("n01440764_10026.JPEG", "n01440764_10026"), ("a.b.jpg", "a_b"), ("a/b.png", "a_b"), ("a.b", "a_b")],
)
def test_keys_have_no_dots_and_no_slashes(name, key):
    assert key_of(Path(name)) == key


@pytest.mark.parametrize("resize", [Resize(size=48, mode="short"), Resize(size=200, mode="short")])
def test_resize_keeps_the_bytes_of_an_image_that_fits(tmp_path, resize):
    content = jpeg(0, 64, 48)
    assert encoded(tmp_path, content, resize=resize) == ("jpg", content)
