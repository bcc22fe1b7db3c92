"""The example of docs/store-format.md, executed as it is written there, but for the names."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from bigscl.data.index import is_list_of, write_sample_list
from bigscl.store import HeatmapStore
from tests.test_tools.conftest import bigscl

PAGE = Path(__file__).parents[2] / "docs" / "store-format.md"
NAMES = 'run, key, name = "runs/mine", "n01440764_10026", "tench"'


def executed(run, key, name):
    """The variables of the examples after they ran on this run."""
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    code = "\n".join(blocks)
    assert code.count(NAMES) == 1
    found: dict = {}
    exec(code.replace(NAMES, f"run, key, name = {str(run)!r}, {key!r}, {name!r}"), found)
    return found


@pytest.mark.parametrize("layout", ["dense", "topk", "compact"])
@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_a_heatmap_is_read_by_key_with_json_and_zarr_alone(runs, index, layout, request, tmp_path):
    run = request.getfixturevalue("run" if layout == "dense" else "topk")
    write_sample_list(index, run / "samples.json")
    if layout == "compact":
        assert bigscl("compact", run, "--codec", "uint8", "--apply").code == 0
    store = HeatmapStore.open(run / "store")
    for sample in (0, 9, int(index.ids()[-1])):
        rows = store.read([sample])
        number = int(rows.kept_classes()[0][-1])
        found = executed(run, index.key(sample), index.class_names[number])
        assert found["score"] == rows.scores[0, number]
        np.testing.assert_array_equal(found["heatmap"], rows.heatmaps_of([0], [number])[0])


@pytest.mark.filterwarnings("ignore:unclosed file:ResourceWarning")
def test_the_history_of_a_tracked_sample_is_read_too(run, index):
    write_sample_list(index, run / "samples.json")
    store = HeatmapStore.open(run / "store")
    found = executed(run, index.key(0), index.class_names[0])
    sample = store.spec.history_samples[0]
    assert found["tracked_key"] == index.key(sample)
    history = store.history(sample)
    assert found["recorded"] == list(history)
    for place, rows in enumerate(history.values()):
        np.testing.assert_array_equal(found["grown"][place], rows.heatmaps[0])
        np.testing.assert_array_equal(found["classes"][place], rows.classes[0])


def test_the_list_of_an_older_run_is_exported(runs, index, tmp_path):
    answer = bigscl("export", runs / "dense", "samples", "-o", tmp_path / "samples.json", "--json")
    assert answer.json()["rows"] == index.num_samples
    samples = json.loads((tmp_path / "samples.json").read_text())
    assert samples["class_names"] == list(index.class_names)
    names = [f"{one['name']}/{key}" for one in samples["shards"] for key in one["keys"]]
    assert names == [index.name(int(sample)) for sample in index.ids()]
    assert is_list_of(index, tmp_path / "samples.json")
    (tmp_path / "samples.json").write_text("{}")
    assert not is_list_of(index, tmp_path / "samples.json")
