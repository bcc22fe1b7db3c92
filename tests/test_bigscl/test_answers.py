"""The file of answers: nothing is lost, twice is once, the later stands, and bad lines are named."""

import contextlib
import json
import multiprocessing
import re
import time
from dataclasses import replace
from itertools import permutations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bigscl.common.user_error import UserError
from bigscl.data import answers as module
from bigscl.data.answers import Answer, AnswersFile, now, read_answers, standing_answers

HOSTILE = [
    'a"b',
    "line\nfeed",
    "\r\n\t\0",
    "} ] , :",
    "back\\slash\\u12",
    "\u2028\u202e katze \U0001f408",
    "\ud800",
    "",
    "k" * 10_000,
    "<script>alert(1)</script>",
    "true",
]


def answer(key="a", class_name="cat", yes=True, who="ann", second=0, snapshot="7"):
    return Answer(key, class_name, yes, who, f"2025-01-31T12:00:{second:02d}.000000+00:00", snapshot)


def test_answers_come_back_whatever_their_texts(tmp_path):
    given = [answer(key=one, class_name=two, who=one, second=3) for one in HOSTILE for two in HOSTILE]
    AnswersFile(tmp_path / "new" / "answers.jsonl").append(given)
    found = read_answers(tmp_path / "new" / "answers.jsonl")
    assert sorted(found.standing.values(), key=repr) == sorted(given, key=repr)
    assert not found.conflicts
    assert not found.torn


def test_the_same_answer_again_leaves_the_file_as_it_is(tmp_path):
    path = tmp_path / "answers.jsonl"
    first, second = answer(), answer(yes=False, second=1)
    assert AnswersFile(path).append([first, second, first]) == 2
    before = path.read_bytes()
    assert AnswersFile(path).append([first]) == 0
    assert path.read_bytes() == before
    assert read_answers(path).standing == {("a", "cat"): second}


def slow_standing(answers):
    """What stands, by trying every moment for every pair."""
    found = {}
    for pair in {one.pair for one in answers}:
        own = [one for one in answers if one.pair == pair]
        last = [max((one for one in own if one.who == who), key=order) for who in {one.who for one in own}]
        said = [one for one in last if one.yes is not None]
        if said:
            found[pair] = max(said, key=order)
    return found


def order(one):
    return one.when, one.to_line()


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.builds(
            answer,
            key=st.sampled_from("ab"),
            class_name=st.sampled_from(["cat", "dog"]),
            yes=st.sampled_from([True, False, None]),
            who=st.sampled_from(["ann", "bob"]),
            second=st.integers(0, 5),
        ),
        max_size=8,
    ),
    st.randoms(use_true_random=False),
)
def test_the_latest_answer_of_each_person_and_then_of_all_stands_in_any_order(answers, random):
    shuffled = answers + answers[:2]
    random.shuffle(shuffled)
    found = standing_answers(shuffled)
    assert found.standing == slow_standing(answers)
    assert found.asked == {one.pair for one in answers}
    for lost, stands in found.conflicts:
        assert lost.yes != stands.yes
        assert lost.who != stands.who
        assert found.standing[lost.pair] == stands


def test_people_who_disagree_are_reported_and_a_change_of_mind_is_not():
    ann, bob = answer(second=1), answer(yes=False, who="bob", second=2)
    for both in permutations([ann, bob]):
        assert standing_answers(both).conflicts == [(ann, bob)]
    assert not standing_answers([ann, answer(yes=False, second=2)]).conflicts


def test_moments_are_compared_as_moments_not_as_texts():
    early = replace(answer(), when="2025-01-31T12:30:00+02:00")
    late = replace(answer(yes=False), when="2025-01-31T11:00:00Z")
    assert standing_answers([late, early]).standing[("a", "cat")] == late


@pytest.mark.parametrize("text", [text for text in HOSTILE if len(text) < 100])
def test_a_line_cut_anywhere_is_skipped(tmp_path, text):
    path = tmp_path / "answers.jsonl"
    line = answer(key=text, class_name=text, who=text).to_line().encode()
    lines = [line[:length] + zeros for length in range(1, len(line)) for zeros in (b"", b"\0\0")]
    path.write_bytes(b"\n".join([*lines, line, lines[-1]]))
    found = read_answers(path)
    assert len(found.standing) == 1
    assert list(found.torn) == [*range(1, len(lines) + 1), len(lines) + 2]


@pytest.mark.parametrize("length", [1, 20, -1])
def test_an_answer_after_a_torn_one_is_kept(tmp_path, length):
    path = tmp_path / "answers.jsonl"
    path.write_text(answer("x").to_line() + "\n" + answer("torn").to_line()[:length])
    AnswersFile(path).append([answer("y")])
    found = read_answers(path)
    assert [key for key, _ in found.standing] == ["x", "y"]
    assert found.torn == (2,)


def test_a_last_line_without_its_end_of_line_counts(tmp_path):
    path = tmp_path / "answers.jsonl"
    path.write_text(answer("x").to_line())
    AnswersFile(path).append([answer("y")])
    assert len(read_answers(path).standing) == 2


def said(path):
    """What a file says, or that one line of it is refused."""
    try:
        return read_answers(path).standing
    except UserError as error:
        return "refused" if re.search(r"answers\.jsonl: line [12]: .*remove it", str(error)) else str(error)


@pytest.mark.parametrize("bit", range(8))
def test_every_flipped_bit_is_an_error_that_names_the_line_or_changes_nothing(tmp_path, bit):
    path = tmp_path / "answers.jsonl"
    AnswersFile(path).append([answer("a"), answer("b", yes=False, second=1)])
    whole, expected = path.read_bytes(), read_answers(path).standing
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << bit
        path.write_bytes(flipped)
        assert said(path) in (expected, "refused"), flipped


def test_lines_of_other_programs_need_no_digest(tmp_path):
    (tmp_path / "answers.jsonl").write_text(json.dumps(answer().values()) + "\n")
    assert read_answers(tmp_path / "answers.jsonl").standing == {("a", "cat"): answer()}


GOOD = answer().values()


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("hello", "'hello'"),
        ("[1]", "[1]"),
        ('{"key": "a", "class": cat}', "expected an answer"),
        ('{"key": "a" "class": "cat"}', "expected an answer"),
        (json.dumps({"key": "a"}), "no 'class'"),
        (json.dumps(GOOD | {"yes": 1}), "yes is '1'"),
        (json.dumps(GOOD | {"yes": "yes"}), "yes is 'yes'"),
        (json.dumps(GOOD | {"key": 5}), "key is '5'"),
        (json.dumps(GOOD | {"klass": "a\n"}), "an unknown 'klass'"),
        (json.dumps(GOOD | {"when": "yesterday"}), "when is 'yesterday'"),
        (json.dumps(GOOD | {"when": "2025-01-31T12:00:00"}), "with a zone"),
        ("[" * 100_000, "expected an answer"),
        (b"\xff\xfe", "UTF-8"),
    ],
)
def test_a_bad_line_is_named(tmp_path, line, said):
    path = tmp_path / "answers.jsonl"
    data = line if isinstance(line, bytes) else line.encode()
    path.write_bytes(answer().to_line().encode() + b"\n\n" + data + b"\n")
    with pytest.raises(UserError, match="line 3: ") as raised:
        read_answers(path)
    assert str(path) in str(raised.value)
    assert said in str(raised.value)
    assert len(str(raised.value)) < 600 + len(str(path))


def test_an_answer_that_could_not_be_read_again_is_not_written(tmp_path):
    with pytest.raises(UserError, match="when is ''"):
        AnswersFile(tmp_path / "a.jsonl").append([replace(answer(), when="")])
    assert not (tmp_path / "a.jsonl").exists()


@pytest.mark.parametrize("who", ["ann", "bob"])
@pytest.mark.parametrize("second", [0, 5])
def test_a_corrected_answer_counts_although_the_clock_was_set_back(tmp_path, who, second):
    path = tmp_path / "answers.jsonl"
    AnswersFile(path).append([answer(second=5)])
    AnswersFile(path).append([answer("other", second=3)])
    corrected = answer(yes=False, who=who, second=second)
    assert AnswersFile(path).append([corrected]) == 1
    assert read_answers(path).standing["a", "cat"].yes is False
    AnswersFile(path).append([replace(corrected, yes=None)])
    assert read_answers(path).standing.get(("a", "cat")) == (None if who == "ann" else answer(second=5))
    moments = [json.loads(line)["when"][17:] for line in path.read_text().splitlines()]
    assert moments == [f"{text}+00:00" for text in ("05.000000", "03.000000", "05.000001", "05.000002")]


def test_answers_of_one_call_count_in_their_order(tmp_path):
    path = tmp_path / "answers.jsonl"
    AnswersFile(path).append([answer(second=5), answer(yes=False, second=4)])
    assert read_answers(path).standing["a", "cat"].yes is False


def test_answers_that_were_given_elsewhere_keep_their_moments(tmp_path):
    path = tmp_path / "answers.jsonl"
    AnswersFile(path).append([answer(second=5)])
    assert AnswersFile(path).append([answer(yes=False, second=4)], dated=True) == 1
    assert read_answers(path).standing["a", "cat"] == answer(second=5)


def test_an_answer_after_the_end_of_time_is_refused(tmp_path):
    path = tmp_path / "answers.jsonl"
    AnswersFile(path).append([replace(answer(), when="9999-12-31T23:59:59.999999-05:00")])
    before = path.read_bytes()
    with pytest.raises(UserError, match="key 'a', class 'cat' is of 9999-12-31 "):
        AnswersFile(path).append([answer(yes=False)])
    assert path.read_bytes() == before


@pytest.mark.parametrize("bad", [b"hello", b"hello\n", b'{"key": "a", "class": cat}\n'])
def test_a_bad_line_is_named_when_an_answer_is_given_and_nothing_is_added(tmp_path, bad):
    path = tmp_path / "answers.jsonl"
    file = AnswersFile(path)
    file.append([answer()])
    path.write_bytes(path.read_bytes() + bad)
    before = path.read_bytes()
    for one in (file, AnswersFile(path)):
        with pytest.raises(UserError, match="line 2: "):
            one.append([answer("b")])
    assert path.read_bytes() == before
    path.write_bytes(before[: -len(bad)])
    assert file.append([answer("b")]) == 1
    assert len(file.read().standing) == 2


def test_lines_are_parsed_once_by_whoever_keeps_the_file(tmp_path, monkeypatch):
    path = tmp_path / "answers.jsonl"
    parsed = []

    def counting(line, where, parse=module._parsed):
        parsed.append(line)
        return parse(line, where)

    AnswersFile(path).append([answer(str(number)) for number in range(50)])
    file = AnswersFile(path)
    assert len(file.read().standing) == 50
    monkeypatch.setattr(module, "_parsed", counting)
    assert file.read() is file.read()
    file.append([answer("mine")])
    assert len(file.read().standing) == 51
    assert len(parsed) == 1
    AnswersFile(path).append([answer("theirs")])
    del parsed[:]
    assert len(file.read().standing) == 52
    file.append([answer("mine"), answer("theirs")])
    assert len(parsed) == 1
    path.write_text(path.read_text().replace(answer("mine").to_line(), answer("ours").to_line()))
    assert ("ours", "cat") in file.read().standing
    assert len(parsed) == 53, "another file is parsed from its start"
    path.unlink()
    assert not file.read().standing


SAID = [("a", True, "ann", 1), ("a", False, "bob", 2), ("b", None, "ann", 0), ("a", None, "bob", 3)]
LINES = [answer(key, yes=yes, who=who, second=second).to_line() for key, yes, who, second in SAID]


def what_it_says(file, data):
    """What a file of these bytes says, or what is wrong with it."""
    try:
        found = file.take(data)
    except UserError as error:
        return str(error)
    return found.standing, found.asked, found.torn, sorted(found.conflicts, key=repr)


@settings(deadline=None, max_examples=200)
@given(
    st.lists(
        st.tuples(st.sampled_from(LINES), st.integers(0, 200), st.sampled_from([b"\n", b""])), max_size=8
    ),
    st.booleans(),
)
def test_a_file_that_grows_says_what_it_says_when_it_is_read_at_once(parts, is_rewritten):
    file, data = AnswersFile(Path("answers.jsonl")), b""
    for number, (line, length, end) in enumerate(parts):
        if is_rewritten and number == 4:
            data = data[len(data) // 2 :]
        data += line[:length].encode() + end
        assert what_it_says(file, data) == what_it_says(AnswersFile(Path("answers.jsonl")), data)


FORK = multiprocessing.get_context("fork")


def write_answers(path, who, count, length, saved):
    for number in range(count):
        AnswersFile(path).append([Answer(f"{number}" + "k" * length, "cat", True, who, now(), "")])
        saved.send(number)


def start_writer(path, who, count, length):
    """A process that writes answers, and the pipe with the numbers of those that it was told are saved."""
    ours, theirs = FORK.Pipe(duplex=False)
    writer = FORK.Process(target=write_answers, args=(path, who, count, length, theirs))
    writer.start()
    theirs.close()
    return writer, ours


def count_saved(pipe):
    count = 0
    with contextlib.suppress(EOFError):
        while True:
            pipe.recv()
            count += 1
    return count


def test_two_writers_at_once_lose_nothing(tmp_path):
    path = tmp_path / "answers.jsonl"
    writers = [start_writer(path, who, 40, 50) for who in ("ann", "bob")]
    assert [count_saved(pipe) for _, pipe in writers] == [40, 40]
    for writer, _ in writers:
        writer.join()
    lines = path.read_text().splitlines()
    assert len(lines) == 80
    assert all(json.loads(line) for line in lines)
    assert not read_answers(path).torn


def test_killed_writers_lose_nothing_that_they_were_told_is_saved(tmp_path):
    path = tmp_path / "answers.jsonl"
    saved = 0
    for delay in (0.0, 0.01, 0.03):
        writer, pipe = start_writer(path, f"{delay}", 10_000, 300_000)
        pipe.recv()
        time.sleep(delay)
        writer.kill()
        saved += 1 + count_saved(pipe)
        writer.join()
        AnswersFile(path).append([answer(f"after {delay}")])
        saved += 1
    lines = path.read_bytes().split(b"\n")
    found = read_answers(path)
    assert saved <= len(lines) - 1 - len(found.torn) <= saved + 3
    assert len([key for key, _ in found.standing if key.startswith("after")]) == 3
