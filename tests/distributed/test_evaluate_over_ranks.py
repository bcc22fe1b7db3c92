"""The same evaluation with 1, 2 and 3 processes and any batch size leaves the same bytes in every file."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bigscl.data.scan import scan
from bigscl.models.spatial import build_model
from tests.tars import labelled, write_tar

ROOT = Path(__file__).parent.parent.parent
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
            members += labelled(f"image{number}", number, labels=own, observed=own[:1], boxes=boxes)
            number += 1
        write_tar(folder / f"v-{shard}.tar", members)
    scan(str(folder / "v-*.tar"), num_classes=NUM_CLASSES)[0].save(folder / "v.npz")
    torch.manual_seed(0)
    save_file(build_model(BACKBONE, NUM_CLASSES).export(), folder / "net.safetensors")
    return folder


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def evaluate(made, processes, batch_size, *options):
    output = made / f"{processes}-{batch_size}"
    launch = [sys.executable]
    if processes > 1:
        launch += ["-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", processes]
        launch += ["--main_process_port", free_port()]
    job = ["-m", "bigscl.evaluate", made / "net.safetensors", "--backbone", BACKBONE, "--workers", "0"]
    job += ["--shards", made / "v-*.tar", "--index", made / "v.npz", "--size", "48", "--resize", "square"]
    command = [*launch, *job, "--boxes", "--batch-size", batch_size, "-o", output, *options]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true"}
    result = subprocess.run(
        list(map(str, command)),
        capture_output=True,
        text=True,
        timeout=150,
        cwd=ROOT,
        env=environment,
        check=False,
    )
    return result, {
        path.relative_to(output): path.read_bytes() for path in output.rglob("*") if path.is_file()
    }


def test_number_of_processes_and_batch_size_leave_no_trace_in_any_file(made):
    result, alone = evaluate(made, 1, 64)
    assert result.returncode == 0, result.stderr
    assert {"report.json", "report.md", "scores.png"} <= {str(path) for path in alone}
    assert b'"num_images": 79' in alone[Path("report.json")]
    for processes, batch_size in ((2, 7), (3, 1)):
        result, files = evaluate(made, processes, batch_size)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("present classes") == 1
        assert files.keys() == alone.keys()
        assert [str(path) for path in files if files[path] != alone[path]] == []


def test_a_mistake_is_one_line_however_many_processes_make_it(made):
    result, _ = evaluate(made, 2, 9, "--real", made / "nowhere.json")
    assert result.returncode != 0
    assert result.stderr.count("bigscl.evaluate: ") == 1
    assert "nowhere.json: no such file" in result.stderr
