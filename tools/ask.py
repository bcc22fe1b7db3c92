"""`bigscl ask`: ask a person what the memory of a run would learn most from."""

import getpass
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigscl.common.command_line import AsJson
from bigscl.common.text import printable
from bigscl.common.url_secrets import with_image_names
from bigscl.common.user_error import UserError
from bigscl.data.answers import Answer, AnswersFile, now
from bigscl.evaluation.asking import By
from bigscl.tools.answer_files import Asked, Format, label_studio_view, read_answered, write_questions
from bigscl.tools.opening import AtSnapshot, Data, DataFlags, StorageFlags, Store, open_store, run_folder
from bigscl.tools.questions import Question, Questions, answers_files
from bigscl.tools.samples import find_class
from bigscl.tools.text import counted, table, tell

if TYPE_CHECKING:
    from collections.abc import Sequence

SIMULATED = "simulated"
BLOCK = 25
"""Simulated answers between two rankings."""
KEYS = "y yes, n no, s skip, u undo, q quit"


def command(
    store: Store,
    count: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 100,
    class_name: Annotated[str | None, typer.Option("--class", help="Ask about this class only.")] = None,
    who: Annotated[str | None, typer.Option(help="Who answers. Default: the user's name.")] = None,
    answers: Annotated[
        Path | None,
        typer.Option(
            help="File of answers. Default: data.answers of the run, or answers.jsonl in its folder."
        ),
    ] = None,
    by: Annotated[
        By,
        typer.Option(
            help="Order: queue, what changes training most; chance, what most likely corrects a label; or "
            "what these are compared with."
        ),
    ] = "queue",
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the random order.")] = 0,
    listing: Annotated[bool, typer.Option("--list", help="Only print the questions.")] = False,
    export: Annotated[
        Format | None, typer.Option(help="Write the questions for another tool: to --output.")
    ] = None,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="File to export to.")] = None,
    images: Annotated[
        str, typer.Option(help="Where that tool finds an image; {key} stands for its key.")
    ] = "{key}",
    import_file: Annotated[
        Path | None,
        typer.Option("--import", help="Add the answers in a file that was exported and filled in."),
    ] = None,
    simulate: Annotated[
        int | None, typer.Option(min=1, help="Let the full labels of the shards answer so many questions.")
    ] = None,
    snapshot: AtSnapshot = None,
    *,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Ask whether images show classes: what the memory expects and no label names, or labels it doubts.

    First come the questions whose answers are expected to change training most, spread over classes and
    images; the order follows the answers. `--by chance` asks what most likely corrects the labels, which
    finds the most missing ones. Answers are added to a file, which `data.answers` of a config names: then
    training counts yes as an annotated positive and no as a known negative.

    Example: bigscl ask runs/mine --count 50
    """
    if (export is None) != (output is None):
        raise UserError("--export FORMAT and --output FILE: give both or neither.")
    opened = open_store(store, snapshot, storage)
    data = source.need("ask", store, opened.spec.fingerprint)
    opened = open_store(store, opened.snapshot.id, storage, data)
    files = answers_files(run_folder(store), data, answers)
    person = who or (SIMULATED if simulate else getpass.getuser())
    if import_file is not None:
        tell(*_import(import_file, files[0], person, data), as_json)
        return
    only = None if class_name is None else find_class(class_name, data.index)
    questions = Questions(opened, data, files, most=simulate or count, by=by, only=only, seed=seed)
    session = Session(questions, files[0], person, str(opened.snapshot.id))
    if export is not None and output is not None:
        chosen = questions.next(count)
        write_questions(export, output, chosen, snapshot=session.snapshot, images=with_image_names(images))
        tell(*_exported(export, output, chosen), as_json)
    elif simulate is not None:
        tell(*_simulate(session, data, simulate), as_json)
    elif listing or as_json:
        chosen = questions.next(count)
        tell([asdict(one) for one in chosen], _listed(chosen), as_json)
    else:
        _ask(session, count)


class Session:
    """A person who answers questions; every answer is on the disk before the next question comes."""

    def __init__(self, questions: Questions, path: Path, who: str, snapshot: str) -> None:
        self.questions, self.file, self.who, self.snapshot = questions, AnswersFile(path), who, snapshot
        self.answered: list[tuple[Question, bool]] = []

    def answer(self, given: "Sequence[tuple[Question, bool]]") -> None:
        """Save answers, and let the queue hear them."""
        self.file.append([self._line(question, yes) for question, yes in given])
        for question, yes in given:
            self.questions.hear(question, yes)
        self.answered += given

    def undo(self) -> Question | None:
        """Withdraw the last answer; return its question, None if there is none."""
        if not self.answered:
            return None
        question, _ = self.answered.pop()
        self.file.append([self._line(question, None)])
        self.questions.forget(question)
        return question

    def _line(self, question: Question, yes: bool | None) -> Answer:
        return Answer(question.key, question.class_name, yes, self.who, now(), self.snapshot)


# A person


def _ask(session: Session, count: int) -> None:
    print(f"{KEYS}; answers go to {printable(str(session.file.path))}")
    again: Question | None = None
    while len(session.answered) < count:
        question = again or next(iter(session.questions.next(1)), None)
        again = None
        if question is None:
            print("no question is left")
            break
        print(_asked(question, len(session.answered) + 1, count), end=" ", flush=True)
        match _read_key():
            case "y" | "n" as key:
                session.answer([(question, key == "y")])
            case "s":
                session.questions.hear(question, None)
            case "u":
                again = session.undo() or question
            case "q":
                break
            case _:
                print(f"  {KEYS}")
                again = question
    yes = sum(one for _, one in session.answered)
    told = counted(len(session.answered), "answer")
    print(f"{told}, {yes} of them yes, in {printable(str(session.file.path))}")


def _asked(question: Question, number: int, count: int) -> str:
    doubt = "label, " if question.named else ""
    return printable(
        f"{number}/{count}  {question.key}: {question.class_name}? ({doubt}score {question.score:.2f}, "
        f"corrects with chance {question.chance:.2f})"
    )


def _read_key() -> str:
    """Return the first letter of a line; the end of the input quits."""
    try:
        return input().strip().lower()[:1]
    except (EOFError, OSError):  # no input, or none that can be read
        print()
        return "q"


# Files, lists and simulations


def _listed(questions: "Sequence[Question]") -> str:
    rows = [
        [f"{one.chance:.2f}", one.key, one.class_name, "label" if one.named else "", f"{one.score:.2f}"]
        for one in questions
    ]
    return table(("chance", "image", "class", "", "score"), rows)


def _exported(form: Format, output: Path, questions: "Sequence[Question]") -> tuple[dict[str, Any], str]:
    told = f"{output}: {counted(len(questions), 'question')} for {form}"
    if form == "label-studio":
        told += f"\n  labelling interface: {label_studio_view()}"
    return {"output": str(output), "format": form, "questions": len(questions)}, told


def _import(source: Path, path: Path, who: str, data: Data) -> tuple[dict[str, Any], str]:
    from bigscl.data.answered import match_answers
    from bigscl.data.answers import standing_answers

    given = Asked(who=who, when=now())
    found = read_answered(source, given)
    # Names that the shards do not have are refused before anything is added.
    match_answers(data.labelled, standing_answers(found), source)
    file = AnswersFile(path)
    # An answer without a time of its own is new each time; said again by the same person it changes nothing.
    known = {(pair, one.who, one.yes) for pair, one in file.read().standing.items()}
    new = [one for one in found if (one.pair, one.who, one.yes) not in known]
    dated = [one for one in new if one.when != given.when]
    num_new = file.append(dated, dated=True) + file.append(one for one in new if one not in dated)
    facts = {"answers": len(found), "new": num_new, "file": str(path)}
    return facts, f"{source}: {counted(len(found), 'answer')}, {num_new} of them new in {path}"


def _simulate(session: Session, data: Data, count: int) -> tuple[dict[str, Any], str]:
    """Let the full labels answer."""
    index = data.labelled
    index.full_labels()
    while len(session.answered) < count:
        block = session.questions.next(min(BLOCK, count - len(session.answered)))
        if not block:
            break
        session.answer([(one, one.number in index.full_labels()[one.sample]) for one in block])
    found = sum(yes and not one.named for one, yes in session.answered)
    refuted = sum(one.named and not yes for one, yes in session.answered)
    facts = {
        "answers": len(session.answered),
        "found": found,
        "refuted": refuted,
        "file": str(session.file.path),
    }
    told = (
        f"{session.file.path}: {counted(len(session.answered), 'answer')} of the full labels: "
        f"{counted(found, 'missing positive')} found, {counted(refuted, 'label')} refuted"
    )
    return facts, told
