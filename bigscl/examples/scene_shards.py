"""A small dataset for the examples: scenes of handwritten digits in indexed shards."""

from dataclasses import replace
from pathlib import Path

from bigscl.data.build_index import scan
from bigscl.data.index import Index, default_path, load_index
from bigscl.datasets.scenes import scenes
from bigscl.datasets.writer import write

SIZES = {"single": 1, "train": 100, "val": 1, "test": 1}
SIDE = 48
"""Of the crops that the examples train on."""


def scene_shards(folder: Path) -> Index:
    """Return the index of 100 scenes in shards of 16, which one rank makes if there is none."""
    drawn = replace(scenes(SIZES, 0), samples_per_shard=16)
    tars = [str(folder / name) for name in drawn.names("train")]
    if not default_path(tars).exists():
        for _ in write(drawn, folder):
            pass
        index, _ = scan(tars, class_names=drawn.classes)
        index.save(default_path(tars))
    return load_index(tars)
