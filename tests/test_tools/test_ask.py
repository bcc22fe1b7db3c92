"""`bigscl ask`: questions follow the answers, which are kept; other tools get them and give them back."""

import csv
import io
import json

import numpy as np
import pytest

from bigscl.data.answers import Answer, append_answers, now, read_answers
from bigscl.data.scan import scan
from bigscl.store import HeatmapStore, update
from bigscl.tools.answer_files import Asked, read_answered, write_questions
from bigscl.tools.expected import expected_at
from bigscl.tools.questions import Question
from tests.builders import labelled, write_tar
from tests.test_store.conftest import random_update
from tests.test_tools.conftest import add_config, bigscl


def asked(run, *options):
    answer = bigscl("ask", run, "--json", *options)
    assert answer.code == 0, answer.err
    return answer.json()


def pairs(questions):
    return [(one["key"], one["class_name"]) for one in questions]


@pytest.mark.parametrize("name", ["dense", "topk"])
def test_by_chance_the_warmest_of_what_no_label_names_come_first(runs, index, name):
    found = asked(runs / name, "--count", 40, "--by", "chance")
    assert len(found) == 40
    assert len(set(pairs(found))) == 40
    observed = index.labels_of(index.ids())
    for one in found:
        assert index.key(one["sample"]) == one["key"]
        assert (observed[one["sample"], one["number"]] == 1) == one["named"]
    truth = index.labels_of(index.ids(), "labels")
    first = [truth[one["sample"], one["number"]] == 1 for one in found[:15]]
    assert np.mean(first) > 0.8
    shares = {by: len(missing_found(asked(runs / name, "--count", 20, "--by", by), truth)) for by in ORDERS}
    assert shares["chance"] >= max(shares.values()) - 1
    assert shares["random"] < shares["chance"]


ORDERS = ("chance", "score", "uncertainty", "random")


@pytest.mark.parametrize("name", ["dense", "topk"])
def test_the_queue_asks_what_changes_training_most(runs, index, name):
    """Of an expected positive both answers teach something; of all else only what corrects the labels."""
    store = HeatmapStore.open(runs / name / "store", annotations=index.annotations())
    expected = expected_at(store).of(store.read(index.ids()).ranked_by(), index.ids())
    found = asked(runs / name, "--count", 100_000)
    values = []
    for one in found:
        score, chance = one["score"], one["chance"]
        left_out = expected[one["sample"], one["number"]] and not one["named"]
        values.append(chance * (1 - score) + (1 - chance) * score if left_out else chance)
    assert values[0] == max(values)
    assert np.mean(values[:50]) > np.mean(values[50:100]) > np.mean(values[100:])
    surest = max(one["chance"] for one in found)
    assert found[0]["chance"] < surest, "the surest answer comes first, which teaches little"


def missing_found(questions, truth):
    return [one for one in questions if not one["named"] and truth[one["sample"], one["number"]] == 1]


def test_a_person_answers_skips_withdraws_and_quits(run, monkeypatch):
    first = asked(run, "--count", 3)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\nn\nu\nyes\n?\ns\nq\n"))
    answer = bigscl("ask", run, "--who", "ann")
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
    assert bigscl("ask", run).code == 0
    assert not (run / "answers.jsonl").exists()


def test_full_labels_answer_and_are_counted(run, index, tmp_path):
    facts = asked(run, "--simulate", 60)
    given = read_answers(run / "answers.jsonl").standing
    assert facts["answers"] == len(given) == 60
    keys = {index.key(int(sample)): int(sample) for sample in index.ids()}
    truth, observed = (index.labels_of(index.ids(), which) for which in ("labels", "observed"))
    found = 0
    for (key, name), one in given.items():
        place = keys[key], index.class_names.index(name)
        assert one.yes == (truth[place] == 1)
        found += bool(one.yes and observed[place] != 1)
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
    assert bigscl("ask", run, "--class", "nothing").code == 2


def test_answers_of_the_config_are_known_and_more_go_to_the_same_file(run, index):
    first = asked(run, "--count", 4)
    given = [Answer(*pair, True, "ann", now()) for pair in pairs(first)]
    append_answers(run / "mine.jsonl", given)
    add_config(run, index)
    with (run / "config.yaml").open("a") as file:
        file.write(f"  answers: {run / 'mine.jsonl'}\n")
    assert not set(pairs(asked(run, "--count", 30))) & set(pairs(first))
    asked(run, "--simulate", 3)
    assert len(read_answers(run / "mine.jsonl").standing) == 7
    elsewhere = asked(run, "--count", 30, "--answers", run / "other.jsonl")
    assert not set(pairs(elsewhere)) & set(read_answers(run / "mine.jsonl").standing)


def test_a_file_of_other_images_is_refused(run):
    append_answers(run / "answers.jsonl", [Answer("nobody", "1", True, "ann", now())])
    answer = bigscl("ask", run)
    assert answer.code == 2
    assert "1 keys are not in the shards" in answer.err


# Other tools


def fill_in(form, path, said):
    """Answer the exported questions as a person would in another tool; None leaves one open."""
    if form == "csv":
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        for row, yes in zip(rows, said, strict=True):
            row["yes"] = {True: "Yes", False: "no", None: ""}[yes]
        with path.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)
        return
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


@pytest.mark.parametrize("form", ["csv", "coco", "label-studio"])
def test_questions_go_out_and_answers_come_back(run, tmp_path, form):
    path = tmp_path / ("tasks.csv" if form == "csv" else "tasks.json")
    answer = bigscl("ask", run, "--count", 12, "--export", form, "-o", path, "--images", "http://x/{key}.jpg")
    assert answer.code == 0, answer.err
    assert not (run / "answers.jsonl").exists()
    said = [True, False, None] * 4
    fill_in(form, path, said)
    expected = {
        pair: yes for pair, yes in zip(pairs(asked(run, "--count", 12)), said, strict=True) if yes is not None
    }
    for _ in range(2):
        answer = bigscl("ask", run, "--import", path, "--who", "eve@x")
        assert answer.code == 0, answer.err
        given = read_answers(run / "answers.jsonl").standing
        assert {pair: one.yes for pair, one in given.items()} == expected
        assert {one.who for one in given.values()} == {"eve@x"}
        assert len((run / "answers.jsonl").read_text().splitlines()) == 8


def test_an_import_of_older_answers_leaves_what_was_corrected_since(run, tmp_path):
    path = tmp_path / "tasks.json"
    assert bigscl("ask", run, "--count", 2, "--export", "label-studio", "-o", path).code == 0
    fill_in("label-studio", path, [True, True])
    (first, second) = pairs(asked(run, "--count", 2))
    append_answers(run / "answers.jsonl", [Answer(*first, False, "eve@x", "2025-01-31T12:00:01Z")])
    append_answers(run / "answers.jsonl", [Answer(*second, False, "eve@x", "2025-01-31T11:00:00Z")])
    assert bigscl("ask", run, "--import", path).code == 0
    given = read_answers(run / "answers.jsonl").standing
    assert [given[pair].yes for pair in (first, second)] == [False, True]


NAMES = ['"', "line\nfeed", "a,b;c", "\u2028 \U0001f408", "x" * 10_000, "={1+1}", "{key}", "  "]


@pytest.mark.parametrize("form", ["csv", "coco", "label-studio"])
def test_hostile_names_survive_the_way_out_and_back(tmp_path, form):
    path = tmp_path / ("tasks.csv" if form == "csv" else "tasks.json")
    questions = [
        Question(sample=n, key=key, number=m, class_name=name, named=False, score=0.5, chance=0.5)
        for n, key in enumerate(NAMES)
        for m, name in enumerate(NAMES)
    ]
    write_questions(form, path, questions, snapshot="3")
    fill_in(form, path, [True, False] * (len(questions) // 2))
    found = read_answered(path, Asked(who="ann", when=now()))
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
    answer = bigscl("ask", run, "--import", tmp_path / name)
    assert answer.code == 2
    assert str(tmp_path / name) in answer.err
    assert not (run / "answers.jsonl").exists()


def test_unknown_images_are_not_imported(run, tmp_path):
    (tmp_path / "a.csv").write_text("key,class,yes\nnobody,0,yes\n")
    answer = bigscl("ask", run, "--import", tmp_path / "a.csv")
    assert answer.code == 2
    assert "not in the shards" in answer.err
    assert not (run / "answers.jsonl").exists()


def test_export_needs_a_file_of_its_format(run, tmp_path):
    assert bigscl("ask", run, "--export", "csv").code == 2
    answer = bigscl("ask", run, "--export", "coco", "-o", tmp_path / "a.csv")
    assert "written as .json" in answer.err


def test_hostile_keys_and_classes_are_asked_without_harm(tmp_path, monkeypatch):
    names = ["cat\x1b[31m", "dog\n\n", "\u202e"]
    members = [
        member
        for n, key in enumerate(("a", "b\\", "c"))
        for member in labelled(key, n, labels=[0, 1], observed=[0])
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
    answer = bigscl("ask", run, "--count", 4)
    assert answer.code == 0, answer.err
    assert "\x1b" not in answer.out
    assert "\u202e" not in answer.out
    given = read_answers(run / "answers.jsonl").standing
    assert len(given) == 4
    assert all(key.startswith(("train-000000.tar/", "train-000001.tar/")) for key, _ in given)
    assert not set(pairs(asked(run))) & set(given)


def test_a_store_without_a_run_needs_a_file(bare, index, tmp_path):
    answer = bigscl("ask", bare, "--shards", index.urls[0].replace("000000", "*"), "--list")
    assert answer.code == 2
    assert "--answers" in answer.err


def test_a_run_with_all_labels_has_nothing_to_ask(tmp_path, index):
    HeatmapStore.create(tmp_path / "run" / "store", index.annotations("labels"), heatmap_size=4)
    add_config(tmp_path / "run", index)
    answer = bigscl("ask", tmp_path / "run")
    assert answer.code == 2
    assert "nothing is to be asked" in answer.err
