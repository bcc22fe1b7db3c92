"""The same evaluation with 1, 2 and 3 processes and any batch size leaves the same bytes in every file."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bigscl.data.build_index import scan
from bigscl.models.spatial import build_model
from tests.builders import labelled, write_tar
from tests.forks import ROOT
from tests.integration.runs import launcher_words

BACKBONE, NUM_CLASSES = "bigscl.models.smallnet:small_resnet", 4


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Shards of 30, 5 and 44 images with boxes, and a network for them."""
    folder, random = tmp_path_factory.mktemp("ranks"), np.random.default_rng(0)
    number = 0
    for shard, count in enumerate((30, 5, 44)):
        members = []
        for _ in range(count):
            own = np.flatnonzero(random.random(NUM_CLASSES) < 0.4).tolist() or [0]
            boxes = [[label, *random.uniform(0, 0.5, 2), *random.uniform(0.5, 1, 2)] for label in own]
            members += labelled(f"image{number}", number, full=own, given=own[:1], boxes=boxes)
            number += 1
        write_tar(folder / f"v-{shard}.tar", members)
    scan(str(folder / "v-*.tar"), num_classes=NUM_CLASSES)[0].save(folder / "v.npz")
    torch.manual_seed(0)
    save_file(build_model(BACKBONE, NUM_CLASSES).network.state_dict(), folder / "net.safetensors")
    return folder


def run_with_all_threads(words):
    """An evaluation as a user starts it, with as many threads as the machine has cores."""
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    return subprocess.run(
        [sys.executable, "-m", "bigscl.evaluate", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=150,
        cwd=ROOT,
        env={**environment, "ACCELERATE_USE_CPU": "true"},
        check=False,
    )


def evaluate(server, made, processes, batch_size, *options, launched=False):
    """How an evaluation ended, and its files: in an interpreter, under a launcher, or on forked ranks."""
    output = made / f"{processes}-{batch_size}"
    words = [made / "net.safetensors", "--backbone", BACKBONE, "--workers", "0"]
    words += ["--shards", made / "v-*.tar", "--index", made / "v.npz", "--size", "48", "--resize", "square"]
    words += ["--boxes", "--batch-size", batch_size, "-o", output, *options]
    if processes == 1:
        result = run_with_all_threads(words)
    elif launched:
        result = server.run_module(*launcher_words(processes), "-m", "bigscl.evaluate", *words)
    else:
        result = server.run_module("bigscl.evaluate", *words, processes=processes)
    return result, {
        path.relative_to(output): path.read_bytes() for path in output.rglob("*") if path.is_file()
    }


def test_number_of_processes_and_batch_size_leave_no_trace_in_any_file(made, trainer_server):
    result, alone = evaluate(trainer_server, made, 1, 64)
    assert result.returncode == 0, result.stderr
    assert {"report.json", "report.md", "scores.png"} <= {str(path) for path in alone}
    assert b'"num_images": 79' in alone[Path("report.json")]
    assert b'"image_ap": 0.' in alone[Path("report.json")]
    for processes, batch_size, launched in ((2, 7, True), (3, 1, False)):
        result, files = evaluate(trainer_server, made, processes, batch_size, launched=launched)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("present classes") == 1
        assert files.keys() == alone.keys()
        assert [str(path) for path in files if files[path] != alone[path]] == []


def test_a_mistake_is_one_line_however_many_processes_make_it(made, trainer_server):
    result, _ = evaluate(trainer_server, made, 2, 9, "--real", made / "nowhere.json")
    assert result.returncode != 0
    assert result.stderr.count("bigscl.evaluate: ") == 1
    assert "nowhere.json: no such file" in result.stderr
