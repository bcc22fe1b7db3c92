"""The names of `import bigscl`: light to import, typed, and defined once."""

import ast
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import bigscl
from bigscl.config import ConfigError


def test_importing_bigscl_imports_none_of_its_dependencies():
    code = "import bigscl, sys; dir(bigscl); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert not {"torch", "numpy", "zarr", "pydantic", "webdataset", "bigscl.store"} & set(done.stdout.split())


def test_every_name_is_there_and_is_what_type_checkers_see():
    tree = ast.parse(Path(bigscl.__file__).read_text())
    (block,) = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        (each.asname or each.name): (line.module, each.name) for line in block.body for each in line.names
    }
    assert seen == bigscl._DEFINED
    assert sorted(seen) == sorted(bigscl.__all__)
    for name in bigscl.__all__:
        assert getattr(bigscl, name) is not None
        assert name in dir(bigscl)
    with pytest.raises(AttributeError, match="has no attribute 'Memry'"):
        bigscl.Memry  # noqa: B018


def test_an_objective_is_checked_as_that_of_a_config():
    made = bigscl.objective("ep", "cl", norm="rms")
    assert (made.base, made.consistency, made.norm) == ("ep", "cl", "rms")
    for settings, words in (
        ({"base": "enn"}, "base: 'enn': input should be"),
        ({"base": "an", "consistency": "none", "norm": "l2"}, "norm: has no effect without consistency"),
        ({"smoothing": 0.3}, "smoothing: has no effect with base en"),
    ):
        with pytest.raises(ConfigError, match=words):
            bigscl.objective(**settings)


def test_a_dataset_without_shards_has_its_samples_as_rows(tmp_path):
    positives = [[0], [2, 1], [], [3], [0]]
    annotations = bigscl.Annotations.of(positives, 4, rows_per_shard=2)
    assert annotations.shard_sizes.tolist() == [2, 2, 1]
    assert annotations.counts().tolist() == [2, 1, 1, 1]
    assert annotations.fingerprint != bigscl.Annotations.of(positives[::-1], 4, rows_per_shard=2).fingerprint
    settings = bigscl.StoreConfig(url=str(tmp_path / "store"))
    with bigscl.Memory(annotations, settings, heatmap_size=4) as memory:
        scores = memory.lookup(range(5)).scores
    expected = np.zeros((5, 4))
    for row, classes in enumerate(positives):
        expected[row, classes] = 1
    assert torch.equal(scores, torch.from_numpy(expected).half())
    with pytest.raises(ValueError, match="expected at least 1"):
        bigscl.Annotations.of([], 4)
    with pytest.raises(ValueError, match=r"classes span 0\.\.3, expected 0\.\.2"):
        bigscl.Annotations.of(positives, 3)
