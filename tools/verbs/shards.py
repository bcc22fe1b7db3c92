"""Write a dataset as tar shards."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from bigscl.common.command_line import AsJson, with_options
from bigscl.common.files import read_class_names
from bigscl.common.user_error import UserError
from bigscl.datasets.folder import FlatLabels, folder
from bigscl.datasets.multilabel import Protocol, Seed, coco, voc
from bigscl.datasets.scenes import scenes
from bigscl.datasets.table import TableOptions, hugging_face, table
from bigscl.datasets.writer import Sample, Shards, write
from bigscl.tools.shared.terminal import progress

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Write a dataset as tar shards. Run the same command again to resume: finished shards are skipped.",
)

Source = Annotated[Path, typer.Argument(help="Folder of the unpacked dataset.")]
Out = Annotated[Path, typer.Argument(help="Folder for the shards; created if it does not exist.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Writing:
    samples_per_shard: Annotated[int, typer.Option(min=1, max=10**7, help="Number of samples per shard.")] = (
        1000
    )
    workers: Annotated[
        int,
        typer.Option(min=0, max=1024, help="Number of processes that write shards; the bytes are the same."),
    ] = 0
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be written, and write nothing.")
    ] = False
    as_json: AsJson = False

    def run(self, shards: Shards, out: Path) -> None:
        """Write the shards, except in a dry run, and print what they contain."""
        skipped, shards = 0, replace(shards, samples_per_shard=self.samples_per_shard)
        if not self.dry_run:
            total = sum(len(samples) for samples in shards.parts.values())
            with progress(str(out), total, "samples") as advance:
                for shard in write(shards, out, self.workers):
                    skipped += shard.skipped
                    advance(shard.num_samples, f"{shard.name}{' exists' if shard.skipped else ''}")
        summary = _summary(shards, out, written=not self.dry_run, skipped=skipped)
        typer.echo(json.dumps(summary) if self.as_json else _as_text(summary))


@dataclass(frozen=True, slots=True, kw_only=True)
class SceneWriting(Writing):
    """The same, with small shards."""

    samples_per_shard: Annotated[int, typer.Option(min=1, max=10**7, help="Number of samples per shard.")] = (
        50
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFlags:
    """Which columns of a table hold what."""

    image_column: Annotated[
        str | None, typer.Option(help="Column of the images. Default: image, path, file, url, ...")
    ] = None
    label_column: Annotated[
        str | None, typer.Option(help="Column of the labels. Default: label, labels, class, ...")
    ] = None
    separator: Annotated[str, typer.Option(help="Between the labels of a cell of text.")] = ";"
    full: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SPLIT",
            help="Split whose labels are all classes of each image, as metrics need it; may be repeated.",
        ),
    ] = None
    classes: Annotated[
        Path | None, typer.Option(help="Names by number, one a line. Default: from the labels.")
    ] = None
    resize: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Shrink the shorter side to this. Default: original bytes."),
    ] = None
    seed: Seed = 0

    def options(self, split: str | None = None) -> TableOptions:
        return TableOptions(
            image=self.image_column,
            label=self.label_column,
            split=split,
            separator=self.separator,
            full=tuple(self.full or ()),
            class_names=None if self.classes is None else tuple(read_class_names(self.classes)),
            resize=self.resize,
            seed=self.seed,
        )


@app.command("table")
@with_options
def write_table(
    table_file: Annotated[
        Path, typer.Argument(metavar="TABLE", help="Table: .csv, .tsv, .jsonl or .parquet.")
    ],
    out: Out,
    images: Annotated[
        Path | None,
        typer.Option(help="Folder where the paths in the table start. Default: the folder of the table."),
    ] = None,
    split_column: Annotated[
        str | None, typer.Option(help="Column of the split. Default: split, subset, ...; else all is train.")
    ] = None,
    *,
    columns: TableFlags,
    writing: Writing,
) -> None:
    """Write the images of a table, with one or several labels in a row; paths or URLs, names or numbers.

    Rows of the same image are joined. Boxes: the columns x0, y0, x1, y1 (fractions), or lists in `boxes`.

    Example: bigscl shards table photos.csv shards/photos --resize 256
    """
    writing.run(table(table_file, images, columns.options(split_column)), out)


@app.command("hf")
@with_options
def write_hugging_face(
    source: Annotated[str, typer.Argument(help="Name on the Hugging Face hub, or a folder.")],
    out: Out,
    config: Annotated[str | None, typer.Option(help="Configuration of the dataset.")] = None,
    *,
    columns: TableFlags,
    writing: Writing,
) -> None:
    """Write a Hugging Face dataset: its images, labels and splits. Needs pip install 'bigscl[hf]'.

    Example: bigscl shards hf ./my-dataset shards/mine
    """
    writing.run(hugging_face(source, columns.options(), config=config), out)


@app.command("folder")
@with_options
def write_folder(
    source: Source,
    out: Out,
    split: Annotated[
        list[str] | None, typer.Option(help="Split to write; may be repeated. Default: all.")
    ] = None,
    ground_truth: Annotated[
        Path | None, typer.Option(help="Labels of a split whose images are all in one folder.")
    ] = None,
    synsets: Annotated[
        Path | None, typer.Option(help="Classes of the numbers in the ground truth: meta.mat or a list.")
    ] = None,
    resize: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Shrink the shorter side to this. Default: original bytes."),
    ] = None,
    seed: Seed = 0,
    *,
    writing: Writing,
) -> None:
    """Write a dataset with one label per image: SOURCE/train/<class>/<image> or SOURCE/<class>/<image>."""
    if synsets is not None and ground_truth is None:
        raise UserError(f"--synsets {synsets}: has no effect without --ground-truth")
    flat = FlatLabels(ground_truth=ground_truth, synsets=synsets) if ground_truth is not None else None
    shards = folder(source, splits=split or [], flat=flat, resize=resize, seed=seed)
    writing.run(shards, out)


@app.command("voc")
@with_options
def write_voc(
    source: Source,
    out: Out,
    year: Annotated[int, typer.Option(min=2000, max=2100, help="VOC<year> of the devkit.")] = 2012,
    *,
    labels: Protocol,
    writing: Writing,
) -> None:
    """Write Pascal VOC: SOURCE is a VOCdevkit. Official train becomes train and val, official val test."""
    writing.run(voc(source, year=year, protocol=labels), out)


@app.command("coco")
@with_options
def write_coco(
    source: Source,
    out: Out,
    year: Annotated[int, typer.Option(min=2000, max=2100, help="train<year> and val<year>.")] = 2014,
    *,
    labels: Protocol,
    writing: Writing,
) -> None:
    """Write COCO: SOURCE has annotations/, train2014/ and val2014/. Splits as for VOC."""
    writing.run(coco(source, year=year, protocol=labels), out)


@app.command("scenes")
@with_options
def write_scenes(
    out: Out,
    single: Annotated[
        int, typer.Option(min=1, max=10**7, help="Number of images of one digit, for pretraining.")
    ] = 3000,
    train: Annotated[
        int, typer.Option(min=1, max=10**7, help="Number of training scenes of 2-4 digits.")
    ] = 500,
    val: Annotated[int, typer.Option(min=1, max=10**7, help="Number of validation scenes.")] = 500,
    test: Annotated[int, typer.Option(min=1, max=10**7, help="Number of test scenes.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the scenes.")] = 0,
    *,
    writing: SceneWriting,
) -> None:
    """Write scenes of handwritten digits over photographs, made from images in scikit-learn: no download."""
    sizes = {"single": single, "train": train, "val": val, "test": test}
    writing.run(scenes(sizes, seed), out)


def _summary(shards: Shards, out: Path, *, written: bool, skipped: int) -> dict[str, Any]:
    return {
        "out": str(out),
        "kind": shards.kind,
        "written": written,
        "shards_already_there": skipped,
        "classes": len(shards.classes),
        "samples_per_shard": shards.samples_per_shard,
        "parts": {
            part: {"samples": len(samples), "shards": len(shards.names(part)), **_label_counts(samples)}
            for part, samples in shards.parts.items()
        },
    }


def _label_counts(samples: Sequence[Sample]) -> dict[str, int]:
    """Return how many labels there are, and how many of them training may see."""
    full = given = 0
    for sample in samples:
        full += 1 if isinstance(sample.label, int) else len(sample.label.full or sample.label.given)
        given += 1 if isinstance(sample.label, int) else len(sample.label.given)
    return {"full": full, "given": given}


def _as_text(summary: dict[str, Any]) -> str:
    verb = "contains" if summary["written"] else "would contain"
    lines = [f"{summary['out']} {verb} {summary['kind']}, {summary['classes']} classes:"]
    for part, counts in summary["parts"].items():
        lines.append(
            f"  {part}: {counts['samples']} samples in {counts['shards']} shards of up to "
            f"{summary['samples_per_shard']}, {counts['given']} of {counts['full']} labels given"
        )
    if summary["shards_already_there"]:
        lines.append(f"  {summary['shards_already_there']} shards existed already")
    return "\n".join(lines)
