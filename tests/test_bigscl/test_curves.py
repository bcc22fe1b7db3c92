"""Learning curves: what is read from the metrics of runs, and the picture."""

import json

from bigscl.evaluation.run_plots import draw_curves, mean_curve, read_curve


def write_metrics(run, maps, broken=""):
    run.mkdir()
    lines = [{"kind": "val", "step": n, "epoch": n + 1, "map": value} for n, value in enumerate(maps)]
    lines += [
        {"kind": "train", "step": n, "epoch": n // 2 + 1, "loss": 1.0 + n} for n in range(2 * len(maps))
    ]
    lines.append({"kind": "val", "step": 9, "epoch": 10, "map": None})
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + broken)
    return run


def test_curves_count_epochs_from_one_and_average_the_steps_of_each(tmp_path):
    run = write_metrics(tmp_path / "run", [0.5, 0.75])
    assert read_curve(run, "val", "map", 100) == {1: 50.0, 2: 75.0}
    assert read_curve(run, "train", "loss") == {1: 1.5, 2: 3.5}
    assert read_curve(tmp_path / "nothing", "val", "map") == {}


def test_the_mean_is_over_epochs_that_all_seeds_have():
    assert mean_curve([{1: 1.0, 2: 2.0, 3: 5.0}, {1: 3.0, 2: 4.0}]) == {1: 2.0, 2: 3.0}
    assert mean_curve([]) == {}


def test_runs_without_metrics_have_no_picture(tmp_path):
    assert not draw_curves({"an": [tmp_path / "nothing"]}, tmp_path / "curves.png")
    assert not (tmp_path / "curves.png").exists()
