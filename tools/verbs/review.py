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
from bigscl.data.answers import AnswersFile, now, read_answers, standing_answers
from bigscl.data.labels.training_labels import match_answers
from bigscl.evaluation.review import By
from bigscl.tools.shared.find_samples import find_class
from bigscl.tools.shared.label_table import table_writer
from bigscl.tools.shared.open_store import AtSnapshot, DataFlags, StorageFlags, Store, locate, run_folder
from bigscl.tools.shared.questions import (
    LIST_COLUMNS,
    Question,
    QuestionFormat,
    Source,
    answers_files,
    doubtful_labels_text,
    find_doubtful_labels,
    read_tool_answers,
    write_questions,
)
from bigscl.tools.shared.terminal import plural, print_result, table
from bigscl.tools.viewer.open_run import OpenRun, Places
from bigscl.tools.viewer.pictures import QuestionPictures, has_display
from bigscl.tools.viewer.question_queue import QuestionQueue

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
        typer.Option(help="Order. queue: what changes training most; chance: what likely corrects a label."),
    ] = "queue"
    answers: File = None
    snapshot: AtSnapshot = None

    def open(
        self, store: str, source: DataFlags, storage: StorageFlags, most: int
    ) -> tuple[OpenRun, QuestionQueue, Path]:
        """Return the run, its queue of questions, and the file for answers."""
        url = store if self.snapshot is None else f"{store}@{self.snapshot}"
        run = OpenRun(url, Places(source=source, storage=storage, needed_for="review"))
        only = None if self.class_name is None else find_class(self.class_name, run.data.index)
        queue = QuestionQueue(run, answers=self.answers, most=most, by=self.by, only=only)
        for path in queue.paths():
            match_answers(run.data.labelled, read_answers(path), path)
        run.update(now=True)
        return run, queue, queue.paths()[0]


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
    run, queue, path = flags.open(store, source, storage, simulate or flags.count)
    if simulate is not None:
        print_result(*_simulate(run, queue, path, who or SIMULATED, simulate), as_json)
    elif listing or as_json:
        chosen = queue.questions(flags.count)
        print_result([asdict(question) for question in chosen], _listed(chosen), as_json)
    else:
        opens = has_display() if open_images is None else open_images
        with tempfile.TemporaryDirectory(prefix="bigscl-review-") as folder:
            pictures = QuestionPictures(run.store, run.data, run.cache, Path(folder), opens=opens)
            _ask(queue, path, who or getpass.getuser(), flags.count, pictures)


def _ask(queue: QuestionQueue, path: Path, who: str, count: int, pictures: QuestionPictures) -> None:
    """Ask up to `count` questions; every answer is on the disk before the next question comes."""
    print(f"{KEYS}; answers go to {printable(str(path))}")
    given: list[tuple[Question, bool]] = []
    again: Question | None = None
    while len(given) < count:
        question = again or next(iter(queue.questions(1)), None)
        again = None
        if question is None:
            print("no question is left")
            break
        print(printable(pictures.show(question)))
        print(_asked(question, len(given) + 1, count), end=" ", flush=True)
        match _read_key():
            case "y" | "n" as key:
                queue.answer([(question.sample, question.number, key == "y")], who)
                given.append((question, key == "y"))
            case "s":
                queue.skip(question.sample, question.number, again=False)
            case "u" if given:
                again, _ = given.pop()
                queue.answer([(again.sample, again.number, None)], who)
            case "q":
                break
            case "u":
                again = question
            case _:
                print(f"  {KEYS}")
                again = question
    num_yes = sum(yes for _, yes in given)
    print(f"{plural(len(given), 'answer')}, {num_yes} of them yes, in {printable(str(path))}")


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


def _simulate(
    run: OpenRun, queue: QuestionQueue, path: Path, who: str, count: int
) -> tuple[dict[str, Any], str]:
    full = run.data.labelled.full_labels()
    answered: list[tuple[Question, bool]] = []
    while len(answered) < count:
        block = queue.questions(min(BLOCK, count - len(answered)))
        if not block:
            break
        given = [(each, each.number in full[each.sample]) for each in block]
        queue.answer([(each.sample, each.number, yes) for each, yes in given], who)
        answered += given
    num_found = sum(yes and not each.labelled for each, yes in answered)
    refuted = sum(each.labelled and not yes for each, yes in answered)
    facts = {"answers": len(answered), "found": num_found, "refuted": refuted, "file": str(path)}
    told = (
        f"{path}: {plural(len(answered), 'answer')} of the full labels: "
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
    run, queue, _ = flags.open(store, source, storage, flags.count)
    write_questions(
        form,
        output,
        chosen := queue.questions(flags.count),
        run.data.index.class_names,
        snapshot=str(run.store.snapshot.id),
        images=with_image_names(image_prefix),
    )
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
