import json

import pytest
from typer.testing import CliRunner

from bigscl.data.index import load_index
from bigscl.tools.cli import app, main
from tests.builders import VOC, classed, jpeg, labelled, real_data, write_shards, write_tar


def run(*arguments: str):
    return CliRunner().invoke(app, ["index", *arguments, "--jobs", "1"])


def test_the_index_is_written_beside_the_shards_and_summed_up(tmp_path):
    shards = write_shards(tmp_path, [3, 2])
    result = run(*shards)
    assert result.exit_code == 0
    assert "5 samples in 2 shards, 5 classes" in result.output
    index = load_index(shards)
    assert index.fingerprint in result.output
    assert (tmp_path / "bigscl-index-train.npz").exists()


def test_output_goes_where_told(tmp_path):
    shards = write_shards(tmp_path, [3])
    assert run(str(tmp_path), "--output", str(tmp_path / "elsewhere.npz")).exit_code == 0
    assert load_index(shards, tmp_path / "elsewhere.npz").num_samples == 3
    assert not (tmp_path / "bigscl-index-train.npz").exists()


def test_problems_are_listed_with_shard_and_key_and_exit_1(tmp_path):
    good, bad = classed("good", 0, 1), [*classed("far", 1, 1000), ("lost.jpg", jpeg(2))]
    shard = write_tar(tmp_path / "x.tar", good + bad)
    result = run(str(shard), "--classes", "1000")
    assert result.exit_code == 1
    assert "x.tar: far: given: 1000 is out of range, expected 0 to 999" in result.output
    assert "x.tar: lost: no label" in result.output
    assert load_index(str(shard)).num_samples == 1


def test_json_has_the_facts_and_the_problems(tmp_path):
    shard = write_tar(tmp_path / "x.tar", [*labelled("a", 0, full=[1, 2], given=[2]), ("b.jpg", jpeg(1))])
    result = run(str(shard), "--json")
    assert result.exit_code == 1
    facts = json.loads(result.stdout)
    assert (facts["samples"], facts["classes"], facts["given"], facts["full"]) == (1, 3, 1, 2)
    assert [(problem["shard"], problem["key"]) for problem in facts["problems"]] == [(str(shard), "b")]


def test_shards_without_samples_list_their_problems_and_leave_no_index(tmp_path):
    result = run(str(write_tar(tmp_path / "x.tar", [("a.jpg", jpeg(1))])))
    assert result.exit_code == 1
    assert "x.tar: a: no label" in result.output
    assert list(tmp_path.glob("*.npz")) == []


def test_class_names_come_from_classes_txt_beside_the_shards(tmp_path):
    shards = write_shards(tmp_path, [3])
    (tmp_path / "classes.txt").write_text("ant\nbee\ncow\n")
    assert run(*shards).exit_code == 0
    assert load_index(shards).class_names == ("ant", "bee", "cow")


def test_changed_data_is_said_when_indexed_again(tmp_path):
    shards = write_shards(tmp_path, [3, 2])
    assert "has changed" not in run(*shards).output
    assert "has changed" not in run(*shards).output
    write_tar(tmp_path / "train-000001.tar", classed("other", 1, 2))
    result = run(*shards)
    assert result.exit_code == 0
    assert "the data has changed" in result.output
    assert load_index(shards).num_samples == 4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere-*.tar"], "no shards there"),
        (["http://127.0.0.1:9/x.tar"], "needs a local path. Give `bigscl index` --output FILE.npz"),
        (
            ["{folder}", "--output", "{folder}/nowhere/index.npz"],
            "its folder does not exist or is not writable",
        ),
        (["{folder}", "--classes", "0"], "--classes: 0, expected at least 1"),
        (["{folder}", "--classes", "{folder}/empty.txt"], "expected a different name on each line"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_2(tmp_path, capsys, arguments, message):
    write_shards(tmp_path, [1])
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(SystemExit) as caught:
        main(["index", *(argument.format(folder=tmp_path) for argument in arguments)])
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@real_data
def test_real_shards_are_indexed(tmp_path):
    result = run(str(VOC / "train-*.tar"), "--output", str(tmp_path / "voc.npz"))
    assert result.exit_code == 0
    assert "4574 samples in 10 shards, 20 classes" in result.output


def test_thousands_of_problems_are_cut_with_a_count_and_printed_without_control_characters(tmp_path):
    wrong = [[(f"k{n}\x1b[2J.jpg", jpeg(1)), (f"k{n}\x1b[2J.cls", b"%d" % -n)] for n in range(1, 131)]
    write_tar(tmp_path / "x.tar", [*(member for pair in wrong for member in pair), *classed("a", 1, 0)])
    result = run(str(tmp_path / "x.tar"))
    assert result.exit_code == 1
    assert "... and 30 more lines; --json lists all problems" in result.output
    assert "130 problems found" in result.output
    assert "k99\\x1b[2J" in result.output
    assert "\x1b" not in result.output


def test_many_samples_without_a_label_are_one_line_with_their_number(tmp_path):
    for name, count in (("x", 80), ("y", 20)):
        unlabelled = [(f"{name}{n:03d}.jpg", jpeg(1)) for n in range(count)]
        write_tar(tmp_path / f"{name}.tar", [*unlabelled, *classed("a", 1, 0)])
    result = run(str(tmp_path / "x.tar"), str(tmp_path / "y.tar"), "--output", str(tmp_path / "xy.npz"))
    (line,) = [line for line in result.output.splitlines() if "no label" in line]
    assert line.startswith(f"{tmp_path / 'x.tar'}: x000: no label: expected `cls`")
    assert line.endswith("(99 more of the same in 2 shards; --json lists them)")
    assert "x001" not in result.output


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"a\na\n"])
def test_a_list_of_classes_that_cannot_be_used_is_named(tmp_path, capsys, content):
    write_shards(tmp_path, [1])
    (tmp_path / "names.txt").write_bytes(content)
    with pytest.raises(SystemExit) as caught:
        main(["index", str(tmp_path), "--classes", str(tmp_path / "names.txt")])
    assert caught.value.code == 2
    assert "names.txt: " in capsys.readouterr().err
