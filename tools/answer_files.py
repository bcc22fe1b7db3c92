"""Questions for other tools, and their answers back: CSV, Label Studio's tasks, COCO's JSON.

CSV has an empty column `yes`, to be filled with yes or no. Label Studio shows the image, the question and two
choices, `label_studio_view` is its labelling interface; it exports the answers as JSON. In COCO's JSON each
question is an annotation with `attributes: {"yes": null}`. What is not answered is not imported.
"""

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from bigscl.common.files import parse_errors, write_text
from bigscl.common.text import printable
from bigscl.common.user_error import UserError
from bigscl.data.answers import Answer, moment
from bigscl.tools.questions import Question

Format = Literal["label-studio", "coco", "csv"]
SUFFIXES: dict[Format, str] = {"label-studio": ".json", "coco": ".json", "csv": ".csv"}
COLUMNS = ("key", "class", "yes", "question", "score", "snapshot")
WORDS = {
    **dict.fromkeys(("yes", "y", "true", "1"), True),
    **dict.fromkeys(("no", "n", "false", "0"), False),
}
ANSWER = "answer"
"""The name of the choices in Label Studio."""
REMEDY = "Give a file that `bigscl ask --export` wrote, with answers."


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """Where answers come from, for those that do not say."""

    who: str
    when: str


def write_questions(
    form: Format, path: Path, questions: Sequence[Question], *, snapshot: str, images: str = "{key}"
) -> None:
    """Write questions for another tool; `images` with {key} says where that tool finds an image."""
    if path.suffix != SUFFIXES[form]:
        raise UserError(f"{path}: questions for {form} are written as {SUFFIXES[form]}")
    if form == "csv":
        from io import StringIO

        text = StringIO(newline="")
        writer = csv.writer(text)
        writer.writerow(COLUMNS)
        writer.writerows(_row(one, snapshot) for one in questions)
        write_text(path, text.getvalue())
        return
    make = _label_studio if form == "label-studio" else _coco
    write_text(path, json.dumps(make(questions, snapshot, images), indent=1) + "\n")


def _text(question: Question) -> str:
    named = "The label says yes. " if question.named else ""
    return f"{named}Does this image show: {printable(question.class_name)}?"


def _row(question: Question, snapshot: str) -> list[Any]:
    return [question.key, question.class_name, "", _text(question), question.score, snapshot]


def _label_studio(questions: Sequence[Question], snapshot: str, images: str) -> list[dict[str, Any]]:
    return [
        {
            "data": {
                "image": images.replace("{key}", one.key),
                "question": _text(one),
                "key": one.key,
                "class": one.class_name,
                "snapshot": snapshot,
                "score": one.score,
            }
        }
        for one in questions
    ]


def label_studio_view() -> str:
    """Return the labelling interface for these tasks."""
    return (
        '<View><Image name="image" value="$image"/><Header value="$question"/>'
        f'<Choices name="{ANSWER}" toName="image"><Choice value="yes" hotkey="y"/>'
        '<Choice value="no" hotkey="n"/></Choices></View>'
    )


def _coco(questions: Sequence[Question], snapshot: str, images: str) -> dict[str, Any]:
    samples = {one.sample: one.key for one in questions}
    classes = {one.number: one.class_name for one in questions}
    return {
        "info": {"description": "questions of bigscl", "snapshot": snapshot},
        "images": [
            {"id": sample, "file_name": images.replace("{key}", key), "key": key}
            for sample, key in samples.items()
        ],
        # Detectors take category 0 for the background.
        "categories": [{"id": number + 1, "name": name} for number, name in sorted(classes.items())],
        "annotations": [
            {
                "id": place,
                "image_id": one.sample,
                "category_id": one.number + 1,
                "score": one.score,
                "attributes": {"yes": None},
            }
            for place, one in enumerate(questions, 1)
        ],
    }


# Answers


def read_answered(path: Path, asked: Asked) -> list[Answer]:
    """Return the answers in a file of any of the formats; BadFile says what is wrong with it."""
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file of answers")
    if path.suffix == ".csv":
        with parse_errors(path, "a table of answers", REMEDY):
            return list(_from_csv(path, asked))
    with parse_errors(path, "answers in JSON", REMEDY):
        content = json.loads(path.read_text(encoding="utf-8"))
        read = _from_label_studio if isinstance(content, list) else _from_coco
        return list(read(content, asked))


def _from_csv(path: Path, asked: Asked) -> Iterator[Answer]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, strict=True)
        missing = [name for name in COLUMNS[:3] if name not in (reader.fieldnames or ())]
        if missing:
            raise UserError(f"no column {missing[0]!r} in {reader.fieldnames}")
        for row in reader:
            where = f"line {reader.line_num}"
            if None in row or None in row.values():
                raise UserError(f"{where} has another number of columns than the first line")
            yield from _answer(row["key"], row["class"], row["yes"], where, asked, row.get("snapshot", ""))


def _from_label_studio(tasks: list[Any], asked: Asked) -> Iterator[Answer]:
    for place, task in enumerate(tasks):
        where = f"task {place}"
        data = task["data"]
        for annotation in task.get("annotations") or ():
            if annotation.get("was_cancelled"):
                continue
            given = Asked(who=_person(annotation, asked.who), when=annotation.get("created_at") or asked.when)
            for result in annotation["result"]:
                if result.get("from_name") == ANSWER:
                    for choice in result["value"]["choices"]:
                        yield from _answer(
                            data["key"], data["class"], choice, where, given, data.get("snapshot", "")
                        )


def _person(annotation: Mapping[str, Any], default: str) -> str:
    person = annotation.get("completed_by")
    if isinstance(person, dict):
        person = person.get("email") or person.get("id")
    return default if person is None else str(person)


def _from_coco(content: Mapping[str, Any], asked: Asked) -> Iterator[Answer]:
    keys = {image["id"]: image["key"] for image in content["images"]}
    classes = {category["id"]: category["name"] for category in content["categories"]}
    snapshot = str(content.get("info", {}).get("snapshot", ""))
    for annotation in content["annotations"]:
        yes = annotation.get("attributes", {}).get("yes")
        where = f"annotation {annotation['id']}"
        key, name = keys[annotation["image_id"]], classes[annotation["category_id"]]
        yield from _answer(key, name, yes, where, asked, snapshot)


def _answer(key: Any, name: Any, yes: Any, where: str, asked: Asked, snapshot: Any) -> Iterator[Answer]:
    """Yield the answer, or nothing if there is none."""
    word = "" if yes is None else str(yes).strip().lower()
    if not word:
        return
    if word not in WORDS:
        raise UserError(f"{where}: found {printable(word[:40])!r}, expected yes or no")
    if not isinstance(key, str) or not isinstance(name, str):
        raise UserError(
            f"{where}: key {printable(str(key)[:40])!r} or class {printable(str(name)[:40])!r} is no text"
        )
    moment(asked.when)
    yield Answer(key, name, WORDS[word], asked.who, asked.when, str(snapshot))
