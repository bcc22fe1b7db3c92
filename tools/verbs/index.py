"""Scan tar shards once and write their index."""

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from bigscl.common.command_line import AsJson
from bigscl.common.files import read_class_names
from bigscl.common.user_error import UserError
from bigscl.data.build_index import LONGEST_NUMBER, NoSamples, Problem, scan
from bigscl.data.index import Index, default_path, stored_fingerprint
from bigscl.data.open_tar import scheme
from bigscl.data.read_samples import LARGEST_CLASS
from bigscl.data.tar import expand
from bigscl.tools.shared.terminal import progress

MOST_PROBLEMS = 100
FEW_PROBLEMS = 3
"""Of one kind, that are named one by one."""


def command(
    shards: Annotated[
        list[str],
        typer.Argument(help="Tars: paths, folders, globs, brace patterns, or http(s), s3, gs, az URLs."),
    ],
    output: Annotated[
        Path | None, typer.Option(help="Path of the index. Default: in the folder of the shards.")
    ] = None,
    classes: Annotated[
        str | None,
        typer.Option(
            help="Number of classes, or a file with one name per line. Default: classes.txt next to the "
            "shards if it is there, else the largest label is the last class."
        ),
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, max=1024, help="Shards that are scanned at the same time.")
    ] = min(8, os.cpu_count() or 1),
    unlabelled: Annotated[
        bool,
        typer.Option("--unlabelled", help="Keep images without labels, which data.labels_file will give."),
    ] = False,
    allow_pipe: Annotated[bool, typer.Option(help="Run the commands of `pipe:` shards.")] = False,
    as_json: AsJson = False,
) -> None:
    """Scan tar shards once, write their index, and list all problems."""
    urls = expand(shards)
    path = output or default_path(urls)
    # Checked before a scan that may take an hour.
    if not os.access(path.parent, os.W_OK):
        raise UserError(f"{path}: its folder does not exist or is not writable. Choose another --output.")
    names, count = _classes(classes, urls)
    if unlabelled and names is None and count is None:
        raise UserError("--unlabelled: the images do not say which classes there are. Give --classes.")
    before = stored_fingerprint(path)
    try:
        with progress("scanning", len(urls), "shards") as advance:
            index, problems = scan(
                urls,
                class_names=names,
                num_classes=count,
                jobs=jobs,
                allow_pipe=allow_pipe,
                unlabelled=unlabelled,
                on_shard=lambda url: advance(1, url),
            )
    except NoSamples as error:
        _print_problems(error.problems, as_json)
        print(f"bigscl: {error}", file=sys.stderr)
        raise typer.Exit(1) from None
    index.save(path)
    _print(index, problems, path, before, as_json)
    if problems:
        raise typer.Exit(1)


def _classes(given: str | None, urls: list[str]) -> tuple[list[str] | None, int | None]:
    """Return (names, number) of the classes, as far as the command line or classes.txt gives them."""
    if given is not None and given.isdecimal():
        if len(given) > LONGEST_NUMBER or not 1 <= int(given) <= LARGEST_CLASS:
            shown = given[:LONGEST_NUMBER]
            raise UserError(f"--classes: {shown}, expected at least 1 and at most {LARGEST_CLASS}")
        return None, int(given)
    path = Path(given) if given is not None else Path(urls[0]).parent / "classes.txt"
    if given is None and (scheme(urls[0]) or not path.exists()):
        return None, None
    return read_class_names(path), None


def _print(index: Index, problems: list[Problem], path: Path, before: str | None, as_json: bool) -> None:
    facts = _facts(index, path, before)
    if as_json:
        print(json.dumps(facts | {"problems": [asdict(problem) for problem in problems]}))
        return
    _print_problems(problems, as_json)
    print(f"{path}: {facts['samples']} samples in {facts['shards']} shards, {facts['classes']} classes")
    print(f"  labels: {facts['given']} given, {facts['full']} in full; {facts['negatives']} negatives")
    print(f"  {facts['bytes']} bytes, fingerprint {index.fingerprint}")
    if facts["changed"]:
        print(
            f"  the data has changed: its fingerprint was {before}; stores of that data do not open with this"
        )
    if problems:
        print(f"  {len(problems):,} problems found, listed above")


def _facts(index: Index, path: Path, before: str | None) -> dict[str, Any]:
    return {
        "path": str(path),
        "bytes": path.stat().st_size,
        "shards": len(index.urls),
        "samples": index.num_samples,
        "rows_per_shard": index.rows_per_shard,
        "classes": index.num_classes,
        "given": len(index.given.values),
        "negatives": len(index.negatives.values),
        "full": 0 if index.full is None else len(index.full.values),
        "fingerprint": index.fingerprint,
        "changed": before is not None and before != index.fingerprint,
    }


def _print_problems(problems: list[Problem], as_json: bool) -> None:
    if as_json:
        print(json.dumps({"problems": [asdict(problem) for problem in problems]}))
        return
    alike: dict[str, list[Problem]] = {}
    for problem in problems:
        alike.setdefault(problem.what, []).append(problem)
    lines = [line for group in alike.values() for line in _lines(group)]
    for line in lines[:MOST_PROBLEMS]:
        print(line)
    if len(lines) > MOST_PROBLEMS:
        print(f"... and {len(lines) - MOST_PROBLEMS:,} more lines; --json lists all problems")


def _lines(alike: list[Problem]) -> list[str]:
    """Return lines about problems of one kind: one with their number if they are many."""
    if len(alike) <= FEW_PROBLEMS:
        return [str(problem) for problem in alike]
    shards = len({problem.shard for problem in alike})
    more = f"{len(alike) - 1:,} more of the same in {shards:,} shard{'s' if shards > 1 else ''}"
    return [f"{alike[0]} ({more}; --json lists them)"]
