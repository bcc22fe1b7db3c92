"""The rehearsal at ImageNet's size, all of it at its smallest size."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.benchmarks.scale_measure import Row

ROOT = Path(__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", [1.0, 0.2])
def test_whole_rehearsal_at_its_smallest_size(tmp_path, share):
    words = ["--images", "1203", "--shards", "12", "--classes", "30", "--batch", "16"]
    folder, report = tmp_path / "scale", tmp_path / "scale.json"
    command = [sys.executable, "-m", "tests.benchmarks.scale", *words, "--share", str(share)]
    command += ["--folder", str(folder), "--json", str(report)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [Row.from_json(values) for values in json.loads(report.read_text())["runs"][0]["rows"]]
    by_stage = {row.stage: row for row in rows}
    assert "all images visited in the last epoch" in by_stage["show"].note
    starts = 2 if share == 1 else 3
    assert "kill -9" in by_stage[f"start {starts - 1}: the whole process"].note
    assert by_stage[f"start {starts}: the whole process"].note.startswith("resumed at step ")
    assert any("compaction" in stage for stage in by_stage)
    assert {
        "make shards",
        "index train",
        "index val",
        "plan",
        "verify",
        "show --histograms",
    } <= by_stage.keys()
    assert {"diff", "export labels", "export scores", "compact, dry run"} <= by_stage.keys()
    assert all(row.cost.cpu_seconds > 0 and row.cost.rss_process > 0 for row in rows)
    # An epoch's images are counted at its logged steps.
    trained = [row.images for row in rows if "epoch 2, top 10" in row.stage]
    assert np.all(np.array(trained) > 0)
    assert not (folder / "run").exists()
    assert not (folder / "shards").exists()
