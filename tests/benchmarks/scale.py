"""A rehearsal at ImageNet's size: everything a run goes through, and what each part of it costs.

    python -m tests.benchmarks.scale --images 64000                        # minutes
    python -m tests.benchmarks.scale --images 1281167 --shards 1282        # ImageNet; needs 40 GB of disk
    python -m tests.benchmarks.scale --images 64000 --grow                 # and that memory does not grow

Makes tiny images in tars, indexes them, plans, trains one warm-up epoch (scores only), compacts to the top
10 classes, trains top-10 epochs with a tiny network, kills the trainer with -9 in mid-epoch, resumes it, and
calls the tools, each as the real command. Heatmaps are 14 x 14 for 10 of 1000 classes, so that the store has
the bytes of ImageNet's: 5.9 KB per image and version. Prints a table in Markdown; progress goes to stderr.

A step costs about 1 ms of CPU per image, most of it for the maps of 1000 classes. Where that is too much,
--share 0.02 trains a fiftieth of each epoch and fills in the other rows through the store: selection,
compaction, commits, resuming and the tools still meet all images.

Everything is in one folder. What a call makes it removes in the end, except logs and figures in a folder
that was named; --keep leaves it all. A later call with --folder and --stages uses what is there. Other work
on the machine changes wall times: compare CPU seconds.
"""

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from tests.benchmarks.scale_images import RECORD_BYTES
from tests.benchmarks.scale_measure import Cost, Row, Watched, load_rows, save_rows
from tests.benchmarks.scale_report import growth, table
from tests.benchmarks.scale_train import ROOT, SIDE, SLOTS, TOP, Trainer, Training, write_config

SETTINGS = "scale.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What a folder of this benchmark was made for."""

    images: int = 64_000
    shards: int = 64
    classes: int = 1000
    epochs: int = 1
    batch: int = 64
    workers: int = 1
    threads: int = 1
    consistency: str = "scl"
    share: float = 1.0
    seed: int = 0

    @property
    def val_images(self) -> int:
        return min(5000, max(50, self.images // 20))

    @property
    def training(self) -> Training:
        return Training(
            images=self.images,
            seed=self.seed,
            epochs=self.epochs,
            batch=self.batch,
            workers=self.workers,
            threads=self.threads,
            consistency=self.consistency,
            share=self.share,
        )

    def bytes_needed(self, stages: Iterable[str]) -> int:
        """Disk space that these stages fill."""
        scores = 2 * self.classes
        version = scores + TOP * (2 * SIDE * SIDE + 2) + 4
        per_image = {"make": RECORD_BYTES, "index": 100, "train": SLOTS * version + scores, "tools": scores}
        return self.images * sum(per_image[stage] for stage in stages) + 50_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The folder of one rehearsal, and where its parts are."""

    folder: Path
    settings: Settings

    @property
    def shards(self) -> Path:
        return self.folder / "shards"

    @property
    def run(self) -> Path:
        return self.folder / "run"

    @property
    def config(self) -> Path:
        return self.folder / "run.yaml"

    @property
    def exported(self) -> Path:
        return self.folder / "exported"

    @property
    def logs(self) -> Path:
        return self.folder / "logs"

    def measured(self, stage: str) -> Path:
        return self.folder / "measured" / f"{stage}.json"

    def command(self, stage: str, *words: object, fine: tuple[int, ...] = (0,)) -> tuple[Row, str]:
        """(cost, output) of a command; one that ends badly becomes a row that says so."""
        say(f"{stage} ...")
        call = [sys.executable, "-m", *map(str, words)]
        name = stage.replace(" ", "-").replace("/", "-")
        ended = Watched(call, ROOT, self.settings.training.environment(), self.logs / name).run()
        failed = ended.returncode not in fine
        note = f"exit code {ended.returncode}: {ended.last_line}" if failed else ""
        row = Row(stage=stage, cost=ended.cost, note=note, failed=failed)
        say(row.line())
        return row, ended.output

    def bigscl(self, stage: str, *words: object, fine: tuple[int, ...] = (0,)) -> tuple[Row, str]:
        return self.command(stage, "bigscl.tools.cli", *words, fine=fine)


def say(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


# Stages


def make(place: Place) -> list[Row]:
    names = ("images", "shards", "val_images", "classes", "seed")
    options = [
        word for name in names for word in (f"--{name.replace('_', '-')}", getattr(place.settings, name))
    ]
    row, _ = place.command("make shards", "tests.benchmarks.scale_images", place.shards, *options)
    made = sum(path.stat().st_size for path in place.shards.glob("*.tar"))
    return [replace(row, note=row.note or f"{made / 1e9:.2f} GB")]


def index(place: Place) -> list[Row]:
    rows = [
        place.bigscl(f"index {part}", "index", place.shards / f"{part}-*.tar")[0] for part in ("train", "val")
    ]
    write_config(place.settings.training, place.shards, place.run, place.config)
    return [*rows, place.bigscl("plan", "plan", place.config, fine=(0, 1))[0]]


def training(place: Place) -> list[Row]:
    shutil.rmtree(place.run, ignore_errors=True)
    write_config(place.settings.training, place.shards, place.run, place.config)
    trainer = Trainer(training=place.settings.training, config=place.config, run=place.run, logs=place.logs)
    rows = []
    say("train ...")
    for row in trainer.rows():
        say(row.line())
        rows.append(row)
        if row.failed:
            break
    return rows


def tools(place: Place) -> list[Row]:
    shutil.rmtree(place.exported, ignore_errors=True)
    place.exported.mkdir()
    shown, text = place.bigscl("show", "show", place.run, "--json")
    facts = {} if shown.failed else json.loads(text)
    rows = [
        _with_visits(shown, facts, place.settings),
        place.bigscl("verify", "verify", place.run)[0],
        _diff(place, facts),
        _export(place, "labels", "mined.csv", "--which", "expected"),
        _export(place, "scores", "scores.npy"),
        place.bigscl("compact, dry run", "compact", place.run, "--top", TOP // 2)[0],
        place.bigscl("show --histograms", "show", place.run, "--histograms")[0],
    ]
    shutil.rmtree(place.exported)
    return rows


def _with_visits(row: Row, facts: dict[str, Any], settings: Settings) -> Row:
    """After all epochs, each image must have been visited in the last one."""
    if row.failed:
        return row
    found, expected = facts["visited"], {str(settings.epochs): settings.images}
    size = f"store {sum(facts['bytes'].values()) / 1e9:.2f} GB"
    if found == expected:
        return replace(row, note=f"{size}; all images visited in the last epoch")
    return replace(row, note=f"{size}; visited {found}, expected {expected}", failed=True)


def _diff(place: Place, facts: dict[str, Any]) -> Row:
    """The newest snapshot and the oldest one that is kept."""
    snapshots = facts.get("snapshots", [])
    older = [one["id"] for one in snapshots[:-1] if one["step"] != snapshots[-1]["step"]]
    if not older:
        return Row(stage="diff", cost=Cost(), note="needs two snapshots", failed=True)
    row, text = place.bigscl("diff", "diff", f"{place.run}@{older[0]}", place.run, fine=(1,))
    differs = next((line for line in text.splitlines() if line.startswith("rows that differ")), "")
    return replace(row, note=row.note or differs)


def _export(place: Place, what: str, name: str, *options: object) -> Row:
    path = place.exported / name
    row, text = place.bigscl(f"export {what}", "export", place.run, what, "-o", path, *options)
    if row.failed:
        return row
    written = path.stat().st_size
    path.unlink()
    return replace(row, note=text.strip().rpartition(": ")[2] or f"{written / 1e9:.2f} GB")


STAGES: dict[str, Callable[[Place], list[Row]]] = {
    "make": make,
    "index": index,
    "train": training,
    "tools": tools,
}


def made_by(place: Place, stages: Iterable[str]) -> list[Path]:
    """What these stages have made so far."""
    made = {
        "make": [place.shards],
        "index": sorted(place.shards.glob("bigscl-index*")),
        "train": [place.run, place.config],
        "tools": [place.exported],
    }
    return [path for stage in stages for path in made[stage] if path.exists()]


def remove(place: Place, stages: Iterable[str]) -> None:
    """Remove what these stages have made."""
    for path in made_by(place, stages):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)


# One rehearsal


class Refused(Exception):
    """This cannot be measured here."""


def rehearse(place: Place, stages: tuple[str, ...], keep: bool) -> list[Row]:
    """Rows of these stages, and of those measured in this folder before."""
    _claim(place)
    _check_space(place, stages)
    try:
        for stage in stages:
            rows = STAGES[stage](place)
            save_rows(place.measured(stage), rows)
            if any(row.failed for row in rows) and stage != "tools":
                break
        files = [place.measured(stage) for stage in STAGES]
        return [row for file in files if file.exists() for row in load_rows(file)]
    finally:
        if not keep:
            remove(place, stages)


def _claim(place: Place) -> None:
    """Write down what the folder is for, so that a later call works on the same images."""
    folder, path = place.folder, place.folder / SETTINGS
    folder.mkdir(parents=True, exist_ok=True)
    if not path.exists() and any(folder.iterdir()):
        raise Refused(
            f"{folder}: holds files but no {SETTINGS}, so it is not this benchmark's. Use another folder."
        )
    path.write_text(json.dumps(asdict(place.settings), indent=1))


def _check_space(place: Place, stages: tuple[str, ...]) -> None:
    files = (file for path in made_by(place, stages) for file in (path, *path.rglob("*")) if file.is_file())
    there = sum(file.stat().st_size for file in files)
    needed = place.settings.bytes_needed(stages)
    free = shutil.disk_usage(place.folder).free
    if needed > free + there:
        raise Refused(
            f"{place.folder}: {free / 1e9:.1f} GB are free, {needed / 1e9:.1f} GB are needed for "
            f"{place.settings.images:,} images. Use another --folder, or fewer --images."
        )


def settings_of(args: argparse.Namespace) -> Settings:
    """The settings given, the folder's own where none are given, and the defaults."""
    path = None if args.folder is None else args.folder / SETTINGS
    there = json.loads(path.read_text()) if path is not None and path.exists() else {}
    given = {one.name: value for one in fields(Settings) if (value := getattr(args, one.name)) is not None}
    fixed = ("images", "shards", "classes", "seed")
    if "images" in given and "shards" not in given and not there:
        given["shards"] = -(-given["images"] // 1000)
    for name in fixed:
        if there and given.get(name, there[name]) != there[name]:
            raise Refused(
                f"{path}: was made with --{name} {there[name]}, not {given[name]}. Use another folder."
            )
    return Settings(**{**there, **given})


def tenth(settings: Settings) -> Settings:
    return replace(settings, images=settings.images // 10, shards=max(1, settings.shards // 10))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    helps = {
        "images": "default 64,000",
        "shards": "default: one for each 1000 images",
        "classes": "default 1000",
        "epochs": "top-10 epochs after one of warm-up; the last one is killed; default 1",
        "batch": "images per step; default 64",
        "workers": "loader processes; default 1",
        "threads": "of torch; default 1",
        "seed": "of labels and of the moment of the kill; default 0",
    }
    for name, text in helps.items():
        parser.add_argument(f"--{name}", type=int, help=text)
    parser.add_argument("--folder", type=Path, help="default: a temporary one")
    parser.add_argument("--stages", default=",".join(STAGES), help="default: %(default)s")
    parser.add_argument("--keep", action="store_true", help="leave what the stages made in the folder")
    parser.add_argument("--consistency", choices=("scl", "cl", "none"), help="what is trained; default scl")
    parser.add_argument("--share", type=float, help="part of each epoch that is trained; default 1: all")
    parser.add_argument("--grow", action="store_true", help="compare the memory with that of a tenth")
    parser.add_argument("--json", type=Path, help="write the table here too")
    args = parser.parse_args(arguments)
    wanted = args.stages.split(",")
    if unknown := sorted(set(wanted) - STAGES.keys()):
        parser.error(f"--stages: no stage {', '.join(unknown)}; expected some of {', '.join(STAGES)}")
    if args.share is not None and not 0 < args.share <= 1:
        parser.error(f"--share: found {args.share}, expected more than 0, at most 1")
    args.stages = tuple(stage for stage in STAGES if stage in wanted)
    return args


def main(arguments: list[str]) -> int:
    """Exit code 0 if all went well, 1 if a command failed or memory grows, 2 if nothing was measured."""
    args = parse(arguments)
    try:
        settings = settings_of(args)
    except Refused as error:
        print(f"scale: {error}", file=sys.stderr)
        return 2
    temporary = args.folder is None
    folder = Path(tempfile.mkdtemp(prefix="bigscl-scale-")) if temporary else args.folder.resolve()
    sizes = [tenth(settings), settings] if args.grow else [settings]
    try:
        tables = []
        for size in sizes:
            place = Place(folder=folder / f"{size.images}" if args.grow else folder, settings=size)
            say(f"{size.images:,} images in {size.shards:,} shards, {size.classes:,} classes: {place.folder}")
            tables.append(rehearse(place, args.stages, args.keep))
            print(f"\n{size.images:,} images in {size.shards:,} shards, {size.classes:,} classes\n")
            print(table(tables[-1]), flush=True)
    except Refused as error:
        print(f"scale: {error}", file=sys.stderr)
        return 2
    finally:
        if temporary and not args.keep:
            shutil.rmtree(folder, ignore_errors=True)
    grown = False
    if args.grow:
        text, grown = growth(*tables, sizes[1].images - sizes[0].images)
        print(f"\n{text}")
    if args.json:
        write_json(args.json, sizes, tables)
    return int(grown or any(row.failed for rows in tables for row in rows))


def write_json(path: Path, sizes: list[Settings], tables: list[list[Row]]) -> None:
    runs = [
        {"settings": asdict(size), "rows": [row.to_json() for row in rows]}
        for size, rows in zip(sizes, tables, strict=True)
    ]
    path.write_text(json.dumps({"cpus": os.cpu_count(), "runs": runs}, indent=1))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
