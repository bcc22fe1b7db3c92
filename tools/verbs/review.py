"""List doubtful labels, ask people, use their answers."""

import getpass
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from bigscl.common.command_line import HELP, AsJson, with_options
from bigscl.common.text import printable
from bigscl.common.url_secrets import with_image_names
from bigscl.common.user_error import UserError
from bigscl.data.answers import Answer, AnswersFile, now, standing_answers
from bigscl.data.labels.training_labels import match_answers
from bigscl.evaluation.review import By
from bigscl.store import HeatmapStore
from bigscl.tools.shared.find_samples import find_class
from bigscl.tools.shared.label_formats import QuestionFormat, Source, read_tool_answers, write_questions
from bigscl.tools.shared.label_table import table_writer
from bigscl.tools.shared.open_store import (
    AtSnapshot,
    Data,
    DataFlags,
    StorageFlags,
    Store,
    locate,
    run_folder,
)
from bigscl.tools.shared.questions import (
    LIST_COLUMNS,
    Question,
    Questions,
    answers_files,
    doubtful_labels_text,
    find_doubtful_labels,
)
from bigscl.tools.shared.terminal import plural, print_result, table
from bigscl.tools.viewer.open_run import default_cache
from bigscl.tools.viewer.pictures import QuestionPictures, has_display

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": list(HELP)},
    help="List doubtful labels of a run, ask people about images, or let another tool ask them.",
)

SIMULATED = "simulated"
BLOCK = 25
"""Simulated answers between two rankings."""
KEYS = "y yes, n no, s skip, u undo, q quit"

Who = Annotated[str | None, typer.Option(help="Name of the person who answers. Default: the user's name.")]
File = Annotated[
    Path | None,
    typer.Option(
        "--answers", help="File of answers. Default: data.answers of the run, or answers.jsonl in its folder."
    ),
]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionFlags:
    """Questions to ask, and their order."""

    count: Annotated[int, typer.Option(min=1, help="Number of questions.")] = 100
    class_name: Annotated[str | None, typer.Option("--class", help="Ask about this class only.")] = None
    by: Annotated[
        By,
        typer.Option(
            help="Order. queue: what changes training most; chance: what most likely corrects a label; the "
            "others are for comparison."
        ),
    ] = "queue"
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Seed of the random order.")] = 0
    answers: File = None
    snapshot: AtSnapshot = None

    def open(
        self, store: str, source: DataFlags, storage: StorageFlags, most: int
    ) -> tuple[Questions, HeatmapStore, Data, Path]:
        """Return the questions, the snapshot and the data that are asked about, and the file for answers."""
        opened, data = source.open("review", store, self.snapshot, storage)
        files = answers_files(run_folder(store), data, self.answers)
        only = None if self.class_name is None else find_class(self.class_name, data.index)
        questions = Questions(opened, data, files, most=most, by=self.by, only=only, seed=self.seed)
        return questions, opened, data, files[0]


# List doubtful labels


@app.command("list")
@with_options
def list_labels(
    store: Store,
    count: Annotated[
        int, typer.Option(min=0, help="Number of labels of each kind to list, the most suspicious first.")
    ] = 1000,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Write the list: .csv, .jsonl or .parquet.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the output if it exists.")] = False,
    *,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """List labels that are likely wrong (their score stayed low) or missing (a high score without a label).

    A score is the mean of the stored scores at the ends of all epochs. The suspicion that a label is missing
    is its score; that it is wrong, 1 - its score. x and y are the hottest cell, x0 to y1 the box around it.
    If the shards have all labels, the area under the ROC curve says how well the ranking finds mistakes,
    among the classes that were kept.

    Example: bigscl review list runs/mine -o suspicious.csv
    """
    if output is not None and output.exists() and not overwrite:
        raise UserError(f"{output}: already exists. Choose another name, or add --overwrite.")
    folder = _run_of(store)
    opened, data = source.open("review", store, None, storage)
    facts, lists = find_doubtful_labels(folder, opened, data, count)
    if output is not None:
        with table_writer(output, LIST_COLUMNS) as write:
            for columns in lists.values():
                write(columns)
    print_result(facts, doubtful_labels_text(facts, data, output), as_json)


def _run_of(store: str) -> Path:
    """Return the folder of the run, which has the scores of its epochs."""
    folder = run_folder(store)
    if folder is None:
        raise UserError(
            f"{locate(store)}: in no folder of a run, which has the scores of its epochs. Give that folder."
        )
    return folder


# Ask a person


@app.command()
@with_options
def ask(
    store: Store,
    who: Who = None,
    listing: Annotated[bool, typer.Option("--list", help="Only print the questions.")] = False,
    simulate: Annotated[
        int | None, typer.Option(min=1, help="Let the full labels of the shards answer so many questions.")
    ] = None,
    open_images: Annotated[
        bool | None,
        typer.Option(
            "--open/--no-open",
            help="Open each image in a browser: on the page of a running `bigscl view`, else a picture. "
            "Default: if there is a display. The address or the file is printed in any case.",
        ),
    ] = None,
    *,
    flags: QuestionFlags,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Ask whether images show classes: unlabelled ones that are expected, and labels with a low score.

    First come the questions whose answers are expected to change training most, spread over classes and
    images; the order follows the answers. `--by chance` asks what most likely corrects the labels, which
    finds the most missing ones. Answers are added to a file, which `data.answers` of a config names: then
    training counts yes as an annotated positive and no as a known negative.

    Example: bigscl review ask runs/mine --count 50
    """
    questions, opened, data, path = flags.open(store, source, storage, simulate or flags.count)
    snapshot = str(opened.snapshot.id)
    session = Session(questions, path, who or (SIMULATED if simulate else getpass.getuser()), snapshot)
    if simulate is not None:
        print_result(*_simulate(session, data, simulate), as_json)
    elif listing or as_json:
        chosen = questions.next(flags.count)
        print_result([asdict(question) for question in chosen], _listed(chosen), as_json)
    else:
        opens = has_display() if open_images is None else open_images
        cache = default_cache(run_folder(store), locate(store))
        with tempfile.TemporaryDirectory(prefix="bigscl-review-") as folder:
            pictures = QuestionPictures(opened, data, cache, Path(folder), opens=opens)
            _ask(session, flags.count, pictures)


class Session:
    """A person who answers questions; every answer is on the disk before the next question comes."""

    def __init__(self, questions: Questions, path: Path, who: str, snapshot: str) -> None:
        self.questions, self.file, self.who, self.snapshot = questions, AnswersFile(path), who, snapshot
        self.answered: list[tuple[Question, bool]] = []

    def answer(self, given: Sequence[tuple[Question, bool]]) -> None:
        """Save answers, and let the queue follow them."""
        self.file.append([self._line(question, yes) for question, yes in given])
        for question, yes in given:
            self.questions.add_answer(question, yes)
        self.answered += given

    def undo(self) -> Question | None:
        """Withdraw the last answer; return its question, None if there is none."""
        if not self.answered:
            return None
        question, _ = self.answered.pop()
        self.file.append([self._line(question, None)])
        self.questions.withdraw_answer(question)
        return question

    def _line(self, question: Question, yes: bool | None) -> Answer:
        return Answer(question.key, question.class_name, yes, self.who, now(), self.snapshot)


def _ask(session: Session, count: int, pictures: QuestionPictures) -> None:
    print(f"{KEYS}; answers go to {printable(str(session.file.path))}")
    again: Question | None = None
    while len(session.answered) < count:
        question = again or next(iter(session.questions.next(1)), None)
        again = None
        if question is None:
            print("no question is left")
            break
        print(printable(pictures.show(question)))
        print(_asked(question, len(session.answered) + 1, count), end=" ", flush=True)
        match _read_key():
            case "y" | "n" as key:
                session.answer([(question, key == "y")])
            case "s":
                session.questions.add_answer(question, None)
            case "u":
                again = session.undo() or question
            case "q":
                break
            case _:
                print(f"  {KEYS}")
                again = question
    num_yes = sum(yes for _, yes in session.answered)
    told = plural(len(session.answered), "answer")
    print(f"{told}, {num_yes} of them yes, in {printable(str(session.file.path))}")


def _asked(question: Question, number: int, count: int) -> str:
    doubt = "label, " if question.labelled else ""
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


def _listed(questions: Sequence[Question]) -> str:
    rows = [
        [f"{each.chance:.2f}", each.key, each.class_name, "label" * each.labelled, f"{each.score:.2f}"]
        for each in questions
    ]
    return table(("chance", "image", "class", "", "score"), rows)


def _simulate(session: Session, data: Data, count: int) -> tuple[dict[str, Any], str]:
    """Let the full labels answer."""
    index = data.labelled
    index.full_labels()
    while len(session.answered) < count:
        block = session.questions.next(min(BLOCK, count - len(session.answered)))
        if not block:
            break
        session.answer([(each, each.number in index.full_labels()[each.sample]) for each in block])
    num_found = sum(yes and not each.labelled for each, yes in session.answered)
    refuted = sum(each.labelled and not yes for each, yes in session.answered)
    facts = {
        "answers": len(session.answered),
        "found": num_found,
        "refuted": refuted,
        "file": str(session.file.path),
    }
    told = (
        f"{session.file.path}: {plural(len(session.answered), 'answer')} of the full labels: "
        f"{plural(num_found, 'missing positive')} found, {plural(refuted, 'label')} refuted"
    )
    return facts, told


# Other tools


@app.command()
@with_options
def export(
    store: Store,
    form: Annotated[
        QuestionFormat,
        typer.Argument(
            metavar="FORMAT",
            help="label-studio: a folder with tasks and the labelling interface; coco: .json; csv: .csv.",
        ),
    ],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write; label-studio: a folder.")],
    image_prefix: Annotated[
        str,
        typer.Option(
            metavar="PREFIX",
            help="What that tool needs before the path of an image in your dataset (its key, if the shards "
            "do not say); or an address in which {key} stands for its key.",
        ),
    ] = "",
    *,
    flags: QuestionFlags,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Write questions for another tool, to be answered there and imported.

    Example: bigscl review export runs/mine csv -o questions.csv
    """
    questions, opened, data, _ = flags.open(store, source, storage, flags.count)
    chosen, names, snapshot = questions.next(flags.count), data.index.class_names, str(opened.snapshot.id)
    write_questions(form, output, chosen, names, snapshot=snapshot, images=with_image_names(image_prefix))
    facts = {"output": str(output), "format": form, "questions": len(chosen)}
    print_result(facts, f"{output}: {plural(len(chosen), 'question')} for {form}", as_json)


@app.command("import")
@with_options
def import_answers(
    store: Store,
    file: Annotated[Path, typer.Argument(help="A file of `bigscl review export`, with answers.")],
    who: Who = None,
    answers: File = None,
    *,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Add the answers in a file that was exported and filled in.

    Example: bigscl review import runs/mine questions.csv
    """
    _, data = source.open("review", store, None, storage)
    path = answers_files(run_folder(store), data, answers)[0]
    given = Source(who=who or getpass.getuser(), when=now())
    answers_of_tool = read_tool_answers(file, given)
    # Names that the shards do not have are refused before anything is added.
    match_answers(data.labelled, standing_answers(answers_of_tool), file)
    kept = AnswersFile(path)
    # An answer without a time of its own is new each time; said again by the same person it changes nothing.
    known = {(pair, answer.who, answer.yes) for pair, answer in kept.read().standing.items()}
    new = [answer for answer in answers_of_tool if (answer.pair, answer.who, answer.yes) not in known]
    dated = [answer for answer in new if answer.when != given.when]
    num_new = kept.append(dated, dated=True) + kept.append(answer for answer in new if answer not in dated)
    facts = {"answers": len(answers_of_tool), "new": num_new, "file": str(path)}
    print_result(
        facts, f"{file}: {plural(len(answers_of_tool), 'answer')}, {num_new} of them new in {path}", as_json
    )
