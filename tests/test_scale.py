"""The rehearsal at ImageNet's size: its tars, what it measures, and all of it at its smallest size."""

import io
import json
import subprocess
import sys
import tarfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.benchmarks.scale import Place, Refused, Settings, main, rehearse
from tests.benchmarks.scale_images import write_shards
from tests.benchmarks.scale_measure import Cost, Row, Watched
from tests.benchmarks.scale_report import growth

ROOT = Path(__file__).parent.parent


def test_made_tars_hold_every_image_once_under_its_own_key(tmp_path):
    list(write_shards(tmp_path, "train", num_images=103, num_shards=10, num_classes=20, seed=5))
    keys, labels = [], []
    for path in sorted(tmp_path.glob("*.tar")):
        with tarfile.open(path) as tar:
            for info in tar:
                file = tar.extractfile(info)
                if info.name.endswith(".jpg"):
                    assert Image.open(io.BytesIO(file.read())).convert("RGB").size == (32, 32)
                    keys.append(int(info.name.removesuffix(".jpg")))
                else:
                    assert info.name == f"{keys[-1]:09d}.cls"
                    labels.append(int(file.read()))
    assert keys == list(range(103))
    assert set(labels) <= set(range(20))
    assert len(set(labels)) > 10


def test_made_tars_depend_on_the_seed_alone(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        list(write_shards(tmp_path / name, "train", num_images=20, num_shards=2, num_classes=5, seed=seed))
    a, b, c = ((tmp_path / name / "train-000001.tar").read_bytes() for name in "abc")
    assert a == b
    assert a != c


def watched(code: str, tmp_path: Path) -> Watched:
    return Watched([sys.executable, "-c", code], ROOT, {}, tmp_path / "log")


def test_cost_of_a_command_takes_in_its_children(tmp_path):
    out, seen_file = tmp_path / "out", tmp_path / "seen"
    child = (
        "import os, time\n"
        f"x = bytearray(os.urandom(1) * 100_000_000)\nopen({str(out)!r}, 'wb').write(x)\n"
        f"while not os.path.exists({str(seen_file)!r}): time.sleep(0.05)"
    )
    code = f"import subprocess as s, sys; print('said'); s.run([sys.executable, '-c', {child!r}], check=True)"

    def look(seen: Watched) -> None:
        # What `cost` has while the command runs is sampled; only its end has the kernel's own maximum.
        if seen.cost.rss_process >= 100_000_000 and seen.cost.written_bytes >= 100_000_000:
            seen_file.touch()

    ended = watched(code, tmp_path).run(look)
    assert (ended.returncode, ended.output) == (0, "said\n")
    assert ended.cost.written_bytes >= 100_000_000
    assert ended.cost.rss_tree >= ended.cost.rss_process >= 100_000_000
    assert ended.cost.cpu_seconds > 0
    assert ended.cost.wall_seconds > 0


def test_killed_command_leaves_no_child_behind_and_loses_no_cost(tmp_path):
    out = str(tmp_path / "out")
    child = (
        f"import os, sys, time\nopen({out!r}, 'wb').write(bytes(50_000_000))\n"
        "while os.getppid() == int(sys.argv[1]): time.sleep(0.05)"
    )
    code = (
        "import os, subprocess, sys, time\n"
        f"subprocess.Popen([sys.executable, '-c', {child!r}, str(os.getpid())])\n"
        "time.sleep(60)"
    )
    ended = watched(code, tmp_path).run(
        lambda seen: seen.kill() if seen.cost.written_bytes >= 50_000_000 else None
    )
    assert ended.returncode == -9
    assert ended.cost.written_bytes >= 50_000_000


def row(stage: str, megabytes: int) -> Row:
    return Row(stage=stage, cost=Cost(rss_process=megabytes * 1_000_000))


@pytest.mark.parametrize(("megabytes", "grown"), [(110, False), (130, False), (400, True)])
def test_memory_grows_when_rows_of_all_images_are_held(megabytes, grown):
    # 900,000 images more: 33 bytes each are an index, 333 are not.
    text, found = growth([row("verify", 100)], [row("verify", megabytes)], 900_000)
    assert found == grown
    assert f"| verify | 100 | {megabytes} |" in text


def test_images_that_do_not_fit_on_the_disk_are_refused(tmp_path, capsys):
    assert main(["--images", str(10**12), "--folder", str(tmp_path)]) == 2
    assert "GB are needed for 1,000,000,000,000 images" in capsys.readouterr().err


def test_folder_with_other_files_is_refused_and_left_alone(tmp_path):
    (tmp_path / "mine.txt").write_text("mine")
    with pytest.raises(Refused, match="not this benchmark's"):
        rehearse(Place(folder=tmp_path, settings=Settings()), ("make",), keep=False)
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_folder_made_for_other_images_is_refused(tmp_path, capsys):
    assert main(["--images", "100", "--folder", str(tmp_path), "--stages", "make", "--keep"]) == 0
    assert main(["--images", "200", "--folder", str(tmp_path), "--stages", "make"]) == 2
    assert "was made with --images 100, not 200" in capsys.readouterr().err


def test_kill_is_at_another_moment_for_another_seed_and_after_a_save():
    training = Settings(images=64_000, shards=64).training
    moments = {replace(training, seed=seed).kill_after for seed in range(20)}
    assert len(moments) > 10
    assert all(0 < moment < 0.75 * training.steps for moment in moments)
    assert training.kill_after == replace(training).kill_after


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
