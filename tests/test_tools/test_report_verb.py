"""`bigscl report`: the report again, from our predictions or those of another tool."""

import json
import subprocess
import sys
import time

import numpy as np
import pytest

from bigscl.evaluation.report import make_report
from bigscl.evaluation.report_files import write_report
from bigscl.tools.cli import main
from tests.test_bigscl.test_report import image, pooled_twice, problem, saved


def run(*arguments):
    with pytest.raises(SystemExit) as exit_:
        main([str(argument) for argument in arguments])
    return exit_.value.code


def test_scoring_saved_predictions_again_leaves_the_same_files(tmp_path):
    logits, labels = problem()
    predictions = saved(logits, labels, missing=["lost"], shards="somewhere")
    predictions.save(tmp_path / "first" / "predictions.zarr")
    write_report(make_report(predictions), tmp_path / "first")
    assert run("report", tmp_path / "first", "-o", tmp_path / "again") == 0
    for name in ("report.json", "report.md", "scores.png"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "first" / name).read_bytes()


def test_json_is_the_report_file_and_a_name_can_be_given(tmp_path, capsys):
    logits, labels = problem()
    saved(logits, labels).save(tmp_path / "p.zarr")
    assert run("report", tmp_path / "p.zarr", "--json", "--name", "mine", "-o", tmp_path) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed == json.loads((tmp_path / "report.json").read_text())
    assert printed["model"] == "mine"


def test_logits_of_another_tool_are_scored_by_real(tmp_path, capsys):
    logits = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    np.save(tmp_path / "logits.npy", logits)
    np.save(tmp_path / "labels.npy", np.array([0, 1, 2, 0, 1]))
    (tmp_path / "keys.txt").write_text("\n".join(image(n) for n in (5, 3, 1, 2, 4)))
    best = logits.argmax(1).tolist()
    real = [[best[2]], [], [best[1]], [(best[4] + 1) % 3], [best[0], 0]]
    (tmp_path / "real.json").write_text(json.dumps(real))
    options = ["--keys", tmp_path / "keys.txt", "--labels", tmp_path / "labels.npy", "--json"]
    assert run("report", tmp_path / "logits.npy", "--real", tmp_path / "real.json", *options) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["top1"] == 0.75
    assert report["original"]["top1"] == np.mean(np.array(best) == [0, 1, 2, 0, 1])
    assert report["num_images"] == 4


def test_softmax_can_be_asked_for(tmp_path, capsys):
    logits, labels = problem()
    saved(logits, labels).save(tmp_path / "p.zarr")
    run("report", tmp_path / "p.zarr", "--json", "--activation", "softmax")
    report = json.loads(capsys.readouterr().out)
    expected = make_report(saved(logits, labels), activation="softmax")
    assert report["activation"] == "softmax"
    assert report["mean_ap"]["present"] == round(expected.mean_ap.present, 6)


def test_map_pooling_can_be_asked_for_and_is_refused_where_it_was_not_saved(tmp_path, capsys):
    logits, labels = problem()
    other, _ = problem(seed=1)
    pooled_twice(logits, other, labels).save(tmp_path / "p.zarr")
    assert run("report", tmp_path / "p.zarr", "--json", "--pooling", "map") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["mean_ap"]["present"] == round(make_report(saved(other, labels)).mean_ap.present, 6)
    assert report["poolings"]["plain"]["map"] == round(make_report(saved(logits, labels)).mean_ap.present, 6)
    saved(logits, labels).save(tmp_path / "old.zarr")
    assert run("report", tmp_path / "old.zarr") == 0
    assert run("report", tmp_path / "old.zarr", "--pooling", "map") == 2
    assert "only plain logits were saved" in capsys.readouterr().err


def test_the_evaluation_of_a_run_is_found_in_its_folder(tmp_path, capsys):
    logits, labels = problem()
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").touch()
    assert run("report", tmp_path / "run") == 2
    assert f"has no evaluation yet. Make one: bigscl evaluate {tmp_path / 'run'}" in capsys.readouterr().err
    saved(logits, labels).save(tmp_path / "run" / "test" / "predictions.zarr")
    assert run("report", tmp_path / "run") == 0
    assert run("compare", tmp_path / "run", tmp_path / "run" / "test") == 0
    saved(logits, labels).save(tmp_path / "run" / "other" / "predictions.zarr")
    assert run("report", tmp_path / "run") == 2
    assert f"give one of them: {tmp_path / 'run' / 'other'}, " in capsys.readouterr().err
    saved(logits, labels).save(tmp_path / "run" / "evaluation" / "predictions.zarr")
    assert run("report", tmp_path / "run") == 0


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["{here}/nothing"], "no predictions there"),
        (["{here}/p.zarr", "--real", "{here}/real.json"], "no such file"),
        (["{here}/p.zarr", "--keys", "{here}/keys.txt"], "has keys and labels of its own"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(tmp_path, capsys, arguments, complaint):
    logits, labels = problem(num_images=5)
    saved(logits, labels).save(tmp_path / "p.zarr")
    assert run("report", *(argument.format(here=tmp_path) for argument in arguments)) == 2
    said = capsys.readouterr().err
    assert said.startswith("bigscl: ")
    assert complaint in said
    assert len(said.splitlines()) == 1


MEASURED = """
import resource, sys
from bigscl.tools.cli import main
try:
    main(sys.argv[1:])
finally:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


@pytest.mark.slow
def test_46837_images_of_1000_classes_are_scored_in_30_seconds_and_4_gigabytes(tmp_path):
    random = np.random.default_rng(0)
    labels = np.zeros((46837, 1000), np.int8)
    labels[np.arange(46837), random.integers(0, 1000, 46837)] = 1
    labels[np.arange(10000), random.integers(0, 1000, 10000)] = 1
    logits = random.normal(-4, 2, labels.shape).astype(np.float16) + 4 * labels
    saved(logits.astype(np.float16), labels).save(tmp_path / "p.zarr")
    started = time.perf_counter()
    command = [sys.executable, "-c", MEASURED, "report", tmp_path / "p.zarr", "-o", tmp_path / "out"]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=170)
    assert time.perf_counter() - started < 30
    assert int(result.stderr.split()[-1]) * 1024 < 4e9
    assert json.loads((tmp_path / "out" / "report.json").read_text())["num_images"] == 46837
