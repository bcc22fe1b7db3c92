"""`bigscl review`: questions follow the answers, other tools get them; doubtful labels have their place."""

import csv
import io
import json
import os

import numpy as np
import pytest
from PIL import Image

from bigscl.data.answers import Answer, AnswersFile, now, read_answers
from bigscl.data.build_index import scan
from bigscl.data.labels.label_files import with_training_labels
from bigscl.data.labels.training_labels import draw_given
from bigscl.evaluation.sample_plots import draw_samples
from bigscl.memory.score_history import ScoreLog, log_folder
from bigscl.store import HeatmapStore, SingleProcess, update
from bigscl.tools.shared.questions import Question, Source, read_tool_answers, write_questions
from bigscl.tools.shared.shard_passes import expected_at
from bigscl.tools.viewer import pictures
from tests.benchmarks.label_weights import write_noisy_labels
from tests.builders import SIDE, centres, labelled, make_store, write_tar
from tests.test_store.conftest import random_update
from tests.test_tools.conftest import add_config, bigscl


def asked(run, *options):
    answer = bigscl("review", "ask", run, "--json", *options)
    assert answer.code == 0, answer.err
    return answer.json()


def pairs(questions):
    return [(one["key"], one["class_name"]) for one in questions]


@pytest.mark.parametrize("name", ["dense", "topk"])
def test_by_chance_the_warmest_of_what_no_label_names_come_first(runs, index, name):
    found = asked(runs / name, "--count", 40, "--by", "chance")
    assert len(found) == 40
    assert len(set(pairs(found))) == 40
    given = index.labels_of(index.ids())
    for one in found:
        assert index.key(one["sample"]) == one["key"]
        assert (given[one["sample"], one["number"]] == 1) == one["labelled"]
    truth = index.labels_of(index.ids(), "full")
    first = [truth[one["sample"], one["number"]] == 1 for one in found[:15]]
    assert np.mean(first) > 0.8


@pytest.mark.parametrize("name", ["dense", "topk"])
def test_the_queue_asks_what_changes_training_most(runs, index, name):
    """Of an expected positive both answers teach something; of all else only what corrects the labels."""
    store = HeatmapStore.open(runs / name / "store", annotations=index.annotations())
    expected = expected_at(store).expected(store.read(index.ids()).ranked_by(), index.ids())
    found = asked(runs / name, "--count", 100_000)
    values = []
    for one in found:
        score, chance = one["score"], one["chance"]
        left_out = expected[one["sample"], one["number"]] and not one["labelled"]
        values.append(chance * (1 - score) + (1 - chance) * score if left_out else chance)
    assert values[0] == max(values)
    assert np.mean(values[:50]) > np.mean(values[50:100]) > np.mean(values[100:])
    surest = max(one["chance"] for one in found)
    assert found[0]["chance"] < surest, "the surest answer comes first, which teaches little"


def test_a_person_answers_skips_withdraws_and_quits(run, monkeypatch):
    first = asked(run, "--count", 3)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\nn\nu\nyes\n?\ns\nq\n"))
    answer = bigscl("review", "ask", run, "--who", "ann")
    assert answer.code == 0, answer.err
    assert "2 answers, 2 of them yes" in answer.out
    given = read_answers(run / "answers.jsonl")
    assert next(iter(given.standing)) == pairs(first)[0]
    assert [one.yes for one in given.standing.values()] == [True, True]
    assert {one.who for one in given.standing.values()} == {"ann"}
    assert all(one.snapshot.isdecimal() for one in given.standing.values())
    assert len((run / "answers.jsonl").read_text().splitlines()) == 4
    assert not set(pairs(asked(run, "--count", 30))) & set(given.standing)


def test_without_input_nothing_is_answered(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert bigscl("review", "ask", run).code == 0
    assert not (run / "answers.jsonl").exists()


def test_full_labels_answer_and_are_counted(run, index, tmp_path):
    facts = asked(run, "--simulate", 60)
    given = read_answers(run / "answers.jsonl").standing
    assert facts["answers"] == len(given) == 60
    keys = {index.key(int(sample)): int(sample) for sample in index.ids()}
    truth, labelled = (index.labels_of(index.ids(), which) for which in ("full", "given"))
    found = 0
    for (key, name), one in given.items():
        place = keys[key], index.class_names.index(name)
        assert one.yes == (truth[place] == 1)
        found += bool(one.yes and labelled[place] != 1)
    assert facts["found"] == found
    again = asked(run, "--simulate", 60)
    assert again["answers"] == 60
    assert len(read_answers(run / "answers.jsonl").standing) == 120


def test_all_pairs_are_asked_at_last_and_then_none_is_left(run, index):
    assert asked(run, "--simulate", 100_000)["answers"] == (index.labels_of(index.ids()) != 0).sum()
    assert asked(run) == []
    assert asked(run, "--simulate", 5)["answers"] == 0


def test_one_class_only(run, index):
    name = index.class_names[3]
    assert {one["class_name"] for one in asked(run, "--class", name, "--count", 10)} == {name}
    assert bigscl("review", "ask", run, "--class", "nothing").code == 2


def test_answers_of_the_config_are_known_and_more_go_to_the_same_file(run, index):
    first = asked(run, "--count", 4)
    given = [Answer(*pair, True, "ann", now()) for pair in pairs(first)]
    AnswersFile(run / "mine.jsonl").append(given)
    add_config(run, index)
    with (run / "config.yaml").open("a") as file:
        file.write(f"  answers: {run / 'mine.jsonl'}\n")
    assert not set(pairs(asked(run, "--count", 30))) & set(pairs(first))
    asked(run, "--simulate", 3)
    assert len(read_answers(run / "mine.jsonl").standing) == 7
    elsewhere = asked(run, "--count", 30, "--answers", run / "other.jsonl")
    assert not set(pairs(elsewhere)) & set(read_answers(run / "mine.jsonl").standing)


def test_a_file_of_other_images_is_refused(run):
    AnswersFile(run / "answers.jsonl").append([Answer("nobody", "1", True, "ann", now())])
    answer = bigscl("review", "ask", run)
    assert answer.code == 2
    assert "1 keys are not in the shards" in answer.err


# Other tools


FILES = {"csv": "tasks.csv", "coco": "tasks.json", "label-studio": "tasks"}


def fill_in(form, path, said):
    """Answer exported questions as a person would in another tool (None: not); return the file of answers."""
    if form == "csv":
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        for row, yes in zip(rows, said, strict=True):
            row["yes"] = {True: "Yes", False: "no", None: ""}[yes]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return path
    path = path / "tasks.json" if form == "label-studio" else path
    content = json.loads(path.read_text())
    if form == "coco":
        for annotation, yes in zip(content["annotations"], said, strict=True):
            annotation["attributes"]["yes"] = yes
    else:
        for task, yes in zip(content, said, strict=True):
            value = {"choices": ["yes" if yes else "no"]}
            result = {"from_name": "answer", "to_name": "image", "type": "choices", "value": value}
            made = {"completed_by": {"id": 5, "email": "eve@x"}, "created_at": "2025-01-31T12:00:00.123Z"}
            task["annotations"] = [] if yes is None else [{**made, "result": [result]}]
    path.write_text(json.dumps(content))
    return path


@pytest.mark.parametrize("form", ["csv", "coco", "label-studio"])
def test_questions_go_out_and_answers_come_back(run, tmp_path, form):
    path = tmp_path / FILES[form]
    answer = bigscl(
        "review", "export", run, form, "--count", 12, "-o", path, "--image-prefix", "http://x/{key}.jpg"
    )
    assert answer.code == 0, answer.err
    assert not (run / "answers.jsonl").exists()
    said = [True, False, None] * 4
    path = fill_in(form, path, said)
    expected = {
        pair: yes for pair, yes in zip(pairs(asked(run, "--count", 12)), said, strict=True) if yes is not None
    }
    for _ in range(2):
        answer = bigscl("review", "import", run, path, "--who", "eve@x")
        assert answer.code == 0, answer.err
        given = read_answers(run / "answers.jsonl").standing
        assert {pair: one.yes for pair, one in given.items()} == expected
        assert {one.who for one in given.values()} == {"eve@x"}
        assert len((run / "answers.jsonl").read_text().splitlines()) == 8


def test_an_import_of_older_answers_leaves_what_was_corrected_since(run, tmp_path):
    path = tmp_path / "tasks"
    assert bigscl("review", "export", run, "label-studio", "--count", 2, "-o", path).code == 0
    path = fill_in("label-studio", path, [True, True])
    (first, second) = pairs(asked(run, "--count", 2))
    AnswersFile(run / "answers.jsonl").append([Answer(*first, False, "eve@x", "2025-01-31T12:00:01Z")])
    AnswersFile(run / "answers.jsonl").append([Answer(*second, False, "eve@x", "2025-01-31T11:00:00Z")])
    assert bigscl("review", "import", run, path).code == 0
    given = read_answers(run / "answers.jsonl").standing
    assert [given[pair].yes for pair in (first, second)] == [False, True]


NAMES = ['"', "line\nfeed", "a,b;c", "\u2028 \U0001f408", "x" * 10_000, "={1+1}", "{key}", "  "]


@pytest.mark.parametrize("form", ["csv", "coco", "label-studio"])
def test_hostile_names_survive_the_way_out_and_back(tmp_path, form):
    path = tmp_path / FILES[form]
    questions = [
        Question(sample=n, key=key, path="", number=m, class_name=name, labelled=False, score=0.5, chance=0.5)
        for n, key in enumerate(NAMES)
        for m, name in enumerate(NAMES)
    ]
    write_questions(form, path, questions, NAMES, snapshot="3")
    path = fill_in(form, path, [True, False] * (len(questions) // 2))
    found = read_tool_answers(path, Source(who="ann", when=now()))
    assert [one.pair for one in found] == [(one.key, one.class_name) for one in questions]
    assert [one.yes for one in found] == [True, False] * (len(questions) // 2)
    assert {one.snapshot for one in found} == {"3"}


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "key,class\na,b\n"),
        ("a.csv", "key,class,yes\na,b,maybe\n"),
        ("a.csv", "key,class,yes\na,b\n"),
        ("a.json", "{}"),
        ("a.json", "[3]"),
        ("a.json", '[{"data": {"key": 3, "class": "x"}, "annotations": [{"result": [{"from_name": "answer", '
         '"value": {"choices": ["yes"]}}]}]}]'),
        ("a.json", "no json"),
        ("a.txt", ""),
    ],
)  # fmt: skip
def test_a_file_that_is_no_answers_is_named_and_adds_nothing(run, tmp_path, name, content):
    (tmp_path / name).write_text(content)
    answer = bigscl("review", "import", run, tmp_path / name)
    assert answer.code == 2
    assert str(tmp_path / name) in answer.err
    assert not (run / "answers.jsonl").exists()


def test_unknown_images_are_not_imported(run, tmp_path):
    (tmp_path / "a.csv").write_text("key,class,yes\nnobody,0,yes\n")
    answer = bigscl("review", "import", run, tmp_path / "a.csv")
    assert answer.code == 2
    assert "not in the shards" in answer.err
    assert not (run / "answers.jsonl").exists()


def test_export_needs_a_file_of_its_format(run, tmp_path):
    assert bigscl("review", "export", run, "csv").code == 2
    answer = bigscl("review", "export", run, "coco", "-o", tmp_path / "a.csv")
    assert "written as .json" in answer.err


def test_hostile_keys_and_classes_are_asked_without_harm(tmp_path, monkeypatch):
    names = ["cat\x1b[31m", "dog\n\n", "\u202e"]
    members = [
        member
        for n, key in enumerate(("a", "b\\", "c"))
        for member in labelled(key, n, full=[0, 1], given=[0])
    ]
    for shard in (0, 1):
        write_tar(tmp_path / f"train-00000{shard}.tar", members)
    index, _ = scan(str(tmp_path / "train-*.tar"), class_names=names)
    index.save(tmp_path / "bigscl-index-train.npz")
    run = tmp_path / "run"
    HeatmapStore.create(run / "store", index.annotations(), heatmap_size=4)
    with HeatmapStore.open(run / "store", annotations=index.annotations(), mode="w", run="x") as store:
        update(store, 0, index.ids(), random_update(store, index.num_samples, 0))
        store.commit(epoch=0)
    add_config(run, index)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 4))
    answer = bigscl("review", "ask", run, "--count", 4)
    assert answer.code == 0, answer.err
    assert "\x1b" not in answer.out
    assert "\u202e" not in answer.out
    given = read_answers(run / "answers.jsonl").standing
    assert len(given) == 4
    assert all(key.startswith(("train-000000.tar/", "train-000001.tar/")) for key, _ in given)
    assert not set(pairs(asked(run))) & set(given)


def test_a_store_without_a_run_needs_a_file(bare, index, tmp_path):
    answer = bigscl("review", "ask", bare, "--shards", index.urls[0].replace("000000", "*"), "--list")
    assert answer.code == 2
    assert "--answers" in answer.err


def test_a_run_with_all_labels_has_nothing_to_ask(tmp_path, index):
    HeatmapStore.create(tmp_path / "run" / "store", index.annotations("full"), heatmap_size=4)
    add_config(tmp_path / "run", index)
    answer = bigscl("review", "ask", tmp_path / "run")
    assert answer.code == 2
    assert "nothing is to be asked" in answer.err


# Doubtful labels

COLD, HOT = 5, 17


def keep_scores(run, index, epochs=3):
    """Scores of imaginary epochs: the label of one image never warms, a missing one of another stays hot."""
    ids = index.ids()
    named, present = index.labels_of(ids) == 1, index.labels_of(ids, "full") == 1
    scores = np.where(named, 0.9, np.where(present, 0.3, 0.05))
    cold, hot = np.flatnonzero(named[COLD])[0], np.flatnonzero(present[HOT] & ~named[HOT])[0]
    scores[COLD, cold], scores[HOT, hot] = 0.02, 0.85
    log = ScoreLog(run, index.annotations(), SingleProcess(), 10)
    for epoch in range(epochs):
        drift = scores + 0.01 * epoch
        log.note(ids, drift.astype(np.float16))
        log.write(epoch)
    return int(cold), int(hot)


def test_cold_labels_and_hot_missing_ones_come_first_with_their_place(run, index, tmp_path):
    cold, hot = keep_scores(run, index)
    answer = bigscl("review", "list", run, "-o", tmp_path / "found.csv", "--json")
    assert answer.code == 0, answer.err
    found = answer.json()
    assert found["epochs"] == [0, 1, 2]
    assert (found["wrong"][0]["id"], found["wrong"][0]["class"]) == (COLD, cold)
    assert (found["missing"][0]["id"], found["missing"][0]["class"]) == (HOT, hot)
    assert found["wrong"][0]["mean"] == pytest.approx(0.03, abs=1e-3)
    assert found["wrong"][0]["spread"] == pytest.approx(np.std([0.02, 0.03, 0.04]), abs=1e-3)
    assert found["missing"][0]["last"] == pytest.approx(0.87, abs=1e-3)
    assert found["wrong"][0]["suspicion"] > 0.9 > found["wrong"][1]["suspicion"]
    assert found["wrong"][0]["suspicion"] == pytest.approx(1 - found["wrong"][0]["mean"], abs=1e-3)
    # The heat of the store is where the digit is.
    y, x = (centres(index)[HOT, hot] + 0.5) / SIDE
    row = found["missing"][0]
    assert abs(row["x"] - x) <= 1 / SIDE
    assert abs(row["y"] - y) <= 1 / SIDE
    assert row["x0"] <= row["x"] <= row["x1"]
    assert row["y0"] <= row["y"] <= row["y1"]
    # All named classes are present; all missing ones are warmer than the absent.
    assert found["auc"] == {"wrong": None, "missing": 1.0}
    with (tmp_path / "found.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == len(found["wrong"]) + len(found["missing"])
    assert (rows[0]["kind"], int(rows[0]["id"]), rows[0]["key"]) == ("wrong", COLD, index.key(COLD))
    text = bigscl("review", "list", run, "--count", 3).out
    assert "30 images, 3 epochs (1 to 3)" in text
    assert text.count(index.name(COLD)) >= 1


def test_wrong_labels_of_a_run_are_counted_as_such(tmp_path, index):
    write_noisy_labels(index, tmp_path / "noisy.csv", share=0.2, seed=1)
    drawn = with_training_labels(index, tmp_path / "noisy.csv")
    run = tmp_path / "run"
    make_store(run / "store", drawn, epochs=1)
    train = index.urls[0].replace("000000", "*")
    settings = {"data": {"train": train, "labels_file": str(tmp_path / "noisy.csv")}}
    (run / "config.yaml").write_text(json.dumps(settings))
    ids = index.ids()
    named, present = drawn.labels_of(ids) == 1, index.labels_of(ids, "full") == 1
    log = ScoreLog(run, drawn.annotations(), SingleProcess(), 10)
    log.note(ids, np.where(named & present, 0.8, 0.2).astype(np.float16))
    log.write(0)
    found = bigscl("review", "list", run, "--json").json()
    assert found["auc"]["wrong"] == 1.0
    wrong = {(row["id"], row["class"]) for row in found["wrong"][: (named & ~present).sum()]}
    assert wrong == {(int(ids[n]), int(c)) for n, c in zip(*np.nonzero(named & ~present), strict=True)}
    assert len(wrong) == 6


def test_epochs_after_the_snapshot_do_not_count(run, index):
    keep_scores(run, index, epochs=5)
    assert bigscl("review", "list", run, "--json").json()["epochs"] == [0, 1, 2]


def test_a_class_without_a_heatmap_has_no_place(topk, index):
    keep_scores(topk, index)
    found = bigscl("review", "list", topk, "--json").json()
    assert {row["x"] is None for row in found["missing"]} == {True, False}


def test_known_negatives_are_never_missing(tmp_path, index):
    drawn = draw_given(index, 1, negatives=3)
    run = tmp_path / "run"
    make_store(run / "store", drawn, epochs=1)
    settings = {"train": index.urls[0].replace("000000", "*"), "given": {"seed": 1, "negatives": 3}}
    (run / "config.yaml").write_text(json.dumps({"data": settings}))
    keep_scores(run, drawn, epochs=1)
    found = bigscl("review", "list", run, "--json").json()["missing"]
    absent = drawn.labels_of(drawn.ids()) == 0
    assert absent.sum() == 90
    assert len(found) == 30 * 10 - 30 - 90
    assert not any(absent[row["id"], row["class"]] for row in found)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["{runs}/dense"], "has no scores of finished epochs in {runs}/dense/scores. Runs keep them with"),
        (["{bare}", "--shards", "{shards}"], "in no folder of a run"),
        (["{runs}/dense", "-o", "{runs}/dense/config.yaml"], "already exists"),
        (["{run}"], "epoch-0000.npy: not scores of an epoch"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(runs, bare, run, index, arguments, message):
    keep_scores(run, index)
    (log_folder(run, index.annotations()) / "epoch-0000.npy").write_bytes(b"damaged")
    places = {"runs": runs, "bare": bare, "run": run, "shards": index.urls[0].replace("000000", "*")}
    answer = bigscl("review", "list", *(argument.format(**places) for argument in arguments))
    assert answer.code == 2
    assert message.format(**places) in answer.err
    assert len(answer.err.strip().splitlines()) == 1


# Images of questions


@pytest.fixture
def browser(monkeypatch):
    """The addresses that a browser was told to open."""
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    return opened


def lines_of(monkeypatch, run, *options):
    """What a person sees who answers yes, no, and quits."""
    monkeypatch.setattr("sys.stdin", io.StringIO("y\nn\nq\n"))
    answer = bigscl("review", "ask", run, *options)
    assert answer.code == 0, answer.err
    return answer.out.splitlines()


def test_a_question_comes_with_a_picture_that_the_browser_follows(run, monkeypatch, browser):
    seen = []

    def draw(samples, file):
        draw_samples(samples, file)
        with Image.open(file) as picture:
            seen.append((samples[0].title, [panel.name for panel in samples[0].panels], picture.width))

    monkeypatch.setattr(pictures, "draw_samples", draw)
    (first,) = pairs(asked(run, "--count", 1))
    lines = lines_of(monkeypatch, run, "--open")
    assert (seen[0][0], *seen[0][1]) == first
    assert len(seen) == 3
    assert all(width > 200 for *_, width in seen)
    assert sum(line.endswith("question.png") for line in lines) == 3
    (address,) = browser
    assert address.startswith("file://")
    assert address.endswith("question.html")


def test_without_a_display_only_the_file_is_named(run, monkeypatch, browser):
    monkeypatch.setenv("DISPLAY", ":0")  # but the output is no terminal
    lines = lines_of(monkeypatch, run)
    assert sum(line.endswith("question.png") for line in lines) == 3
    assert not browser


def test_a_question_is_shown_on_the_page_while_that_is_served(run, monkeypatch, browser):
    (first,) = asked(run, "--count", 1)
    file = run / "view" / "page.json"
    with pictures.announced([file.parent], "http://127.0.0.1:8765/?token=t"):
        assert file.stat().st_mode & 0o777 == 0o600
        lines, known = lines_of(monkeypatch, run, "--open"), file.read_text()
    page = f"http://127.0.0.1:8765/?token=t&run=0&page=sample&row={first['sample']}&focus={first['number']}"
    assert any(line.endswith(page) for line in lines)
    assert page == browser[0]
    assert not file.exists()
    # Of a process that was killed.
    file.write_text(known.replace(f'"pid": {os.getpid()}', '"pid": 999999999'))
    assert not [line for line in lines_of(monkeypatch, run) if "http://" in line]
