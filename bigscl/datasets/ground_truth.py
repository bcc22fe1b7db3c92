"""Read the labels of images that are all in one folder, as ImageNet's validation images are."""

import re
from pathlib import Path

from bigscl.common.files import BadFile, parse_errors
from bigscl.datasets.image_files import key_of

LONGEST_NUMBER = 20
HINT = "ILSVRC2012_devkit_t12/data/meta.mat, or a file with one class a line"


def read_ground_truth(file: Path, synsets: Path | None) -> list[str] | dict[str, str]:
    """Return class names in the order of the sorted images, or by key if the lines name their images.

    A line is a class or `image class` (spaces or commas; more columns are ignored). A class is a name, or
    the number of a line of `synsets`, counted from 1 as in ImageNet's devkit, from 0 if a 0 occurs. The
    devkit's numbers are not in the order of the sorted names, so numbers without `synsets` are refused.
    """
    with parse_errors(file, "a text file", "Give the ground truth as text, a class on every line."):
        lines = [line.strip() for line in file.read_text().splitlines()]
    rows = [re.split(r"[,\s]+", line) for line in lines if line]
    if rows and rows[0][0] == "ImageId":  # the header of Kaggle's table
        rows = rows[1:]
    if not rows:
        raise BadFile(f"{file}: empty, expected a class on every line")
    column = min(1, len(rows[0]) - 1)
    for number, row in enumerate(rows, 1):
        if len(row) <= column:
            raise BadFile(f"{file}: row {number} is {row[0]!r}, expected `image class` as in the first row")
    names = _names([row[column] for row in rows], file, synsets)
    if column == 0:
        return names
    return {key_of(Path(row[0])): name for row, name in zip(rows, names, strict=True)}


def read_synsets(file: Path) -> list[str]:
    """Return class names by number: the first word of every line, or the leaves of the devkit's meta.mat."""
    if not file.is_file():
        raise FileNotFoundError(f"{file}: not there, expected {HINT}")
    if file.suffix != ".mat":
        with parse_errors(file, "a text file", f"Expected {HINT}."):
            return [line.split()[0] for line in file.read_text().splitlines() if line.strip()]
    try:
        from scipy.io import loadmat  # type: ignore[import-untyped]
    except ImportError:
        raise BadFile(f"{file}: needs scipy to be read: pip install scipy") from None
    with parse_errors(file, "the devkit's meta.mat", f"Expected {HINT}."):
        rows = loadmat(file, squeeze_me=True)["synsets"]
        # Inner nodes of the hierarchy follow the 1,000 leaves.
        leaves = [(int(row["ILSVRC2012_ID"]), str(row["WNID"])) for row in rows if not row["num_children"]]
    return [name for _, name in sorted(leaves)]


def _names(classes: list[str], file: Path, synsets: Path | None) -> list[str]:
    if not all(name.isascii() and name.isdigit() for name in classes):
        if synsets is not None:
            raise BadFile(f"{file}: the classes are names, so a list of synsets has no effect: remove it")
        return classes
    if synsets is None:
        raise BadFile(
            f"{file}: classes are numbers, and their order is not that of the sorted class folders. "
            f"Give the list that the numbers refer to: {HINT}."
        )
    if longest := [name for name in classes if len(name) > LONGEST_NUMBER]:
        raise BadFile(f"{file}: class {longest[0][:LONGEST_NUMBER]}... has {len(longest[0])} digits")
    names, numbers = read_synsets(synsets), [int(name) for name in classes]
    first = 0 if 0 in numbers else 1
    if max(numbers) - first >= len(names):
        raise BadFile(f"{file}: has class {max(numbers)}, but {synsets} names only {len(names)} classes")
    return [names[number - first] for number in numbers]
