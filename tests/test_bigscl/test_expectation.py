import numpy as np
import pytest

from bigscl.data.build_index import scan
from bigscl.selection.k import expectation, k_per_class, positives_per_image
from tests.builders import config_of, labelled, write_shards, write_tar


def config(**changes):
    return config_of(**{"data": {"val": "val.tar"}, "selection": {"K": "auto"}, **changes})


@pytest.fixture(scope="module")
def one_label(tmp_path_factory):
    """The index of shards that name one class of each image."""
    index, _ = scan(write_shards(tmp_path_factory.mktemp("one"), [4, 3]))
    return index


@pytest.fixture(scope="module")
def all_labels(tmp_path_factory):
    """The index of a shard with the full labels of each image: 1, 2 and 3 classes."""
    samples = [member for n in range(3) for member in labelled(f"k{n}", n, full=list(range(n + 1)))]
    index, _ = scan([str(write_tar(tmp_path_factory.mktemp("all") / "val.tar", samples))])
    return index


@pytest.mark.parametrize("base", ["en", "epr"])
def test_auto_is_refused_where_no_validation_image_has_two_labels(one_label, base):
    with pytest.raises(ValueError, match="none of the 7 has two labels") as refused:
        positives_per_image(config(objective={"base": base}), one_label)
    message = str(refused.value)
    assert "--selection.K 1.5" in message
    assert "Count the classes in 50 images" in message
    assert "(an, an_ls, asl, bce, boostlu, crisp, " in message


def test_a_number_full_labels_and_losses_without_k_are_accepted(one_label, all_labels):
    assert positives_per_image(config(selection={"K": 1.5}), one_label) == 1.5
    assert positives_per_image(config(objective={"base": "an"}), one_label) is None
    assert positives_per_image(config(), all_labels) == 2.0


def test_k_of_each_class_comes_from_full_labels_if_asked(one_label, all_labels):
    wanted, counts = config(selection={"K": "auto", "per_class": "labelled"}), np.array([2, 4, 1] + [0] * 7)
    found = k_per_class(wanted, counts[: all_labels.num_classes], 12, all_labels)
    # Shown by 3, 2 and 1 of 3 images; the second would expect 8 of 12 images for 4 labels.
    np.testing.assert_allclose(found[:3], [6, 2, 4])
    assert (found[3:] == 1).all()
    for val in (one_label, None):
        with pytest.raises(ValueError, match=r"selection\.per_class: labelled .* full labels"):
            k_per_class(wanted, counts, 12, val)
    for plain in (False, True):
        assert k_per_class(config(selection={"K": "auto", "per_class": plain}), counts, 12, None) is plain


def test_expected_positives_are_counted_per_image_and_in_total():
    found = expectation(1.5, np.array([4, 2, 0]), 6)
    assert (found.annotated, found.total, found.num_samples) == (6, 9, 6)
    assert str(found) == (
        "K = 1.5: 9 positives expected, 1.50 per image; 6 of them are annotated, 3 are to be found"
    )


def test_a_class_expects_no_more_positives_than_there_are_images():
    assert expectation(3.0, np.array([4, 2]), 6).total == 6 + 6
