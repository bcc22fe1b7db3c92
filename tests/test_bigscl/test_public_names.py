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
from bigscl.data.build_index import scan
from bigscl.data.index import default_path
from tests.builders import write_shards

SMALL = "bigscl.models.smallnet:small_resnet"


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


def test_the_loop_of_the_readme_runs(tmp_path, monkeypatch):
    urls = write_shards(tmp_path, [5, 3, 4])
    index, _ = scan(urls)
    index.save(default_path(urls))
    text = (Path(__file__).parents[2] / "README.md").read_text()
    (code,) = [block for block in text.split("```python\n") if block.startswith("import bigscl\n")]
    for before, after in (
        ('"shards/train-*.tar"', repr(urls)),
        ('"runs/mine/store"', repr(str(tmp_path / "store"))),
        ('"resnet50", index.num_classes, weights="IMAGENET1K_V2"', f'"{SMALL}", index.num_classes'),
        ("heatmap_size=14", "heatmap_size=4"),
        ("top=10, compact_after=5", "top=3, compact_after=1"),
        (", 30)", ", 2)"),
    ):
        assert before in code, before
        code = code.replace(before, after)
    # The README has its own optimizer: any will do.
    monkeypatch.setattr(bigscl, "build_model", with_optimizer(names := {}))
    saved = []
    names |= {"device": "cpu", "checkpoint": None, "batches": make_batches(index), "save": saved.append}
    exec(code.split("```")[0], names)
    assert [one["memory"]["epoch"] for one in saved] == [1, 2]
    with bigscl.Memory(
        index.annotations(), bigscl.StoreConfig(url=str(tmp_path / "store")), heatmap_size=4
    ) as memory:
        memory.load_state_dict(saved[-1]["memory"])
        assert (memory.store.last_epochs()[index.ids()] == 1).all()
        assert memory.store.group.layout == "topk"


def with_optimizer(names):
    """`build_model`, which also puts an optimizer of the model among the names of the README's code."""
    build = bigscl.build_model

    def build_model(*arguments):
        model = build(*arguments)
        names["optimizer"] = torch.optim.SGD(model.parameters(), 0.1)
        return model

    return build_model


def make_batches(index):
    """Noise in the place of images, as dicts."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            "ids": ids,
            "views": [[0.25, 0.0, 0.5, 1.0, 1.0]] * len(ids),
            "images": torch.randn(len(ids), 3, 16, 16, generator=generator),
            "labels": torch.from_numpy(index.labels_of(ids)),
        }
        for ids in np.array_split(index.ids(), 4)
    ]
