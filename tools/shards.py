"""`bigscl shards`: turn a dataset into tar shards, with the labels that training may see."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bigscl.tools.progress import progress

if TYPE_CHECKING:
    from bigscl.datasets.multilabel import Protocol
    from bigscl.datasets.writing import Sample, Shards

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Turn a dataset into tar shards. Run it again to go on where it stopped.",
)

Source = Annotated[Path, typer.Argument(help="Folder of the dataset as downloaded and unpacked.")]
Out = Annotated[Path, typer.Argument(help="Folder for the shards; made if it is not there.")]
PerShard = Annotated[int, typer.Option(min=1, max=10**7, help="Samples in a shard.")]
Workers = Annotated[
    int, typer.Option(min=0, max=1024, help="Processes that write shards; the bytes are the same.")
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Say what would be written, and write nothing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")]
Square = Annotated[
    int | None,
    typer.Option(
        min=1, max=10_000, help="Squash images to this many pixels square. [default: original bytes]"
    ),
]
Positives = Annotated[int, typer.Option(min=1, max=10**7, help="Positive labels kept for each image.")]
Negatives = Annotated[int, typer.Option(min=0, max=10**7, help="Negative labels kept for each image.")]
ProtocolSeed = Annotated[
    int, typer.Option(min=0, max=2**32 - 1, help="Seed of the kept labels and of the split.")
]


@app.command()
def folder(
    source: Source,
    out: Out,
    split: Annotated[
        list[str] | None, typer.Option(help="Only this split; may be repeated. [default: all there are]")
    ] = None,
    ground_truth: Annotated[
        Path | None, typer.Option(help="Labels of a split whose images lie flat in one folder.")
    ] = None,
    synsets: Annotated[
        Path | None, typer.Option(help="What the numbers in the ground truth mean: meta.mat or a list.")
    ] = None,
    resize: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Shrink the short side to this. [default: original bytes]"),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the order of the training samples.")
    ] = 0,
    samples_per_shard: PerShard = 1000,
    workers: Workers = 0,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """One label per image: folders of classes, SOURCE/train/<class>/<image> or SOURCE/<class>/<image>."""
    from bigscl.datasets.folder import FlatLabels
    from bigscl.datasets.folder import folder as read

    if synsets is not None and ground_truth is None:
        raise ValueError(f"--synsets {synsets}: has no effect without --ground-truth")
    flat = FlatLabels(ground_truth=ground_truth, synsets=synsets) if ground_truth is not None else None
    shards = read(
        source, splits=split or [], flat=flat, resize=resize, seed=seed, samples_per_shard=samples_per_shard
    )
    _run(shards, out, workers, dry_run, as_json)


@app.command()
def voc(
    source: Source,
    out: Out,
    year: Annotated[int, typer.Option(min=2000, max=2100, help="Which VOC<year> of the devkit.")] = 2012,
    positives: Positives = 1,
    negatives: Negatives = 0,
    seed: ProtocolSeed = 1200,
    resize: Square = None,
    samples_per_shard: PerShard = 1000,
    workers: Workers = 0,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Pascal VOC: SOURCE is a VOCdevkit. Official train becomes train and val, official val becomes test."""
    from bigscl.datasets.voc import voc as read

    protocol = _protocol(positives, negatives, seed)
    shards = read(source, year=year, protocol=protocol, resize=resize, samples_per_shard=samples_per_shard)
    _run(shards, out, workers, dry_run, as_json)


@app.command()
def coco(
    source: Source,
    out: Out,
    year: Annotated[int, typer.Option(min=2000, max=2100, help="Which train<year> and val<year>.")] = 2014,
    positives: Positives = 1,
    negatives: Negatives = 0,
    seed: ProtocolSeed = 1200,
    resize: Square = None,
    samples_per_shard: PerShard = 1000,
    workers: Workers = 0,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """COCO: SOURCE holds annotations/, train2014/ and val2014/. Splits as for VOC."""
    from bigscl.datasets.coco import coco as read

    protocol = _protocol(positives, negatives, seed)
    shards = read(source, year=year, protocol=protocol, resize=resize, samples_per_shard=samples_per_shard)
    _run(shards, out, workers, dry_run, as_json)


@app.command()
def scenes(
    out: Out,
    single: Annotated[
        int, typer.Option(min=1, max=10**7, help="Pictures of one digit, to pretrain on.")
    ] = 3000,
    train: Annotated[int, typer.Option(min=1, max=10**7, help="Training scenes of 2-4 digits.")] = 500,
    val: Annotated[int, typer.Option(min=1, max=10**7, help="Validation scenes.")] = 500,
    test: Annotated[int, typer.Option(min=1, max=10**7, help="Test scenes.")] = 1000,
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of everything drawn.")] = 0,
    samples_per_shard: PerShard = 50,
    workers: Workers = 0,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Scenes of handwritten digits over clutter, made of images that ship with scikit-learn: no download."""
    from bigscl.datasets.scenes import scenes as draw

    sizes = {"single": single, "train": train, "val": val, "test": test}
    _run(draw(sizes, seed, samples_per_shard), out, workers, dry_run, as_json)


def _protocol(positives: int, negatives: int, seed: int) -> "Protocol":
    from bigscl.datasets.multilabel import Protocol

    return Protocol(num_positives=positives, num_negatives=negatives, seed=seed)


def _run(shards: "Shards", out: Path, workers: int, dry_run: bool, as_json: bool) -> None:
    """Write the shards unless told not to, and print what they hold."""
    from bigscl.datasets.writing import write

    skipped = 0
    if not dry_run:
        total = sum(len(samples) for samples in shards.parts.values())
        with progress(str(out), total, "samples") as advance:
            for shard in write(shards, out, workers):
                skipped += shard.skipped
                advance(shard.num_samples, f"{shard.name}{' was there' if shard.skipped else ''}")
    summary = _summary(shards, out, written=not dry_run, skipped=skipped)
    typer.echo(json.dumps(summary) if as_json else _as_text(summary))


def _summary(shards: "Shards", out: Path, *, written: bool, skipped: int) -> dict[str, Any]:
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


def _label_counts(samples: "Sequence[Sample]") -> dict[str, int]:
    """How many labels there are, and how many of them training may see."""
    labels = observed = 0
    for sample in samples:
        labels += 1 if isinstance(sample.label, int) else len(sample.label.labels)
        observed += 1 if isinstance(sample.label, int) else len(sample.label.observed)
    return {"labels": labels, "observed": observed}


def _as_text(summary: dict[str, Any]) -> str:
    verb = "holds" if summary["written"] else "would hold"
    lines = [f"{summary['out']} {verb} {summary['kind']}, {summary['classes']} classes:"]
    for part, counts in summary["parts"].items():
        lines.append(
            f"  {part}: {counts['samples']} samples in {counts['shards']} shards of up to "
            f"{summary['samples_per_shard']}, {counts['observed']} of {counts['labels']} labels observed"
        )
    if summary["shards_already_there"]:
        lines.append(f"  {summary['shards_already_there']} shards were there already")
    return "\n".join(lines)
