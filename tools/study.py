"""`bigscl study`: configs beside each other over seeds, to a table with spread, and pictures."""

import os
import re
import shlex
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Annotated

import typer

from bigscl.tools.progress import progress
from bigscl.tools.running import Runner, launcher

if TYPE_CHECKING:
    from bigscl.config import Config

SAMPLES_TO_LOOK_AT = 100


def command(
    out: Annotated[Path, typer.Argument(help="Folder for the runs and the results.")],
    configs: Annotated[
        list[Path], typer.Argument(help="What to compare; the first is what others differ from.")
    ],
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Runs of each, with seeds from --first-seed on.")
    ] = 3,
    first_seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Of training and of the observed labels.")
    ] = 0,
    same_labels: Annotated[
        bool, typer.Option("--same-labels", help="Let all seeds see the labels of the config or the shards.")
    ] = False,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'KEY=VALUE ...'", help="One more variant of every config; may be repeated. An ablation."
        ),
    ] = None,
    only_varied: Annotated[
        bool, typer.Option("--only-varied", help="Leave the configs as they are out, run variants only.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A setting of all runs; may be repeated."),
    ] = None,
    test: Annotated[
        list[str] | None,
        typer.Option(help="Shards to evaluate on; may be repeated. [default: the validation shards]"),
    ] = None,
    no_boxes: Annotated[
        bool, typer.Option("--no-boxes", help="The shards have no boxes: leave the pointing game out.")
    ] = False,
    parallel: Annotated[
        int,
        typer.Option(
            min=1, max=1000, help="Runs at a time: one per core or GPU is most. Their output goes to log.txt."
        ),
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the commands, and run nothing.")] = False,
) -> None:
    """Train and evaluate each config with several seeds, and set the results beside each other.

    Observed labels are drawn anew for each seed, unless --same-labels. Called again, it goes on where it
    stopped, in the middle of a run too. It leaves results.md, results.json, scores.png and heatmaps.png in
    OUT. Example, an ablation:

    bigscl study runs/momentum configs/voc12_lite0_scl.yaml --vary store.momentum=0.5
    """
    variants = [*([] if only_varied else [""]), *(vary or [])]
    if not variants:
        raise ValueError("--only-varied: there is no --vary to run")
    trials = plan_trials(
        out,
        configs,
        variants,
        range(first_seed, first_seed + seeds),
        settings or [],
        redraw=not same_labels,
        test=test or [],
        boxes=not no_boxes,
    )
    if dry_run:
        for trial in trials:
            typer.echo(f"{shlex.join(trial.training())}\n{shlex.join(trial.evaluation())}")
        return
    _run_and_report(trials, parallel, out)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One run of a study."""

    config: Path
    variant: str
    """What differs from the config, as it was written; empty if nothing does."""
    seed: int
    folder: Path
    settings: tuple[str, ...]
    """What is said on the command line of the trainer."""
    test: tuple[str, ...] = ()
    """Shards to evaluate on; none: the validation shards."""
    boxes: bool = True
    """Whether the shards say where objects are, so that heatmaps can be judged."""

    @property
    def row(self) -> str:
        """The line of the table that the run counts for."""
        return f"{self.config.stem} {self.variant}".strip()

    @property
    def trained(self) -> bool:
        """Whether training is over."""
        return (self.folder / "done").exists()

    @property
    def done(self) -> bool:
        """Whether there is nothing left to do."""
        return self.trained and self.report.exists()

    @property
    def report(self) -> Path:
        """The evaluation, in a folder of its own for each choice of shards."""
        name = f"test-{_slug(' '.join(self.test))}" if self.test else "validation"
        return self.folder / name / "report.json"

    def resolved(self) -> "Config":
        """The config of the run; ConfigError if there is anything wrong with it."""
        from bigscl.config import load_config

        return load_config(self.config, self.settings)

    def check_unchanged(self) -> None:
        """Refuse what was begun with other settings: it would count for a row that says otherwise."""
        from bigscl.config import changed_settings

        if changed := changed_settings(self.folder / "config.yaml", self.resolved()):
            raise ValueError(
                f"{self.folder}: was begun with other settings than now ({'; '.join(changed)}). Choose "
                f"another folder for the study, or delete that of the run."
            )

    def training(self) -> tuple[str, ...]:
        """The command that trains it."""
        return (*launcher(), "-m", "bigscl.train", os.path.relpath(self.config), *self.settings)

    def evaluation(self) -> tuple[str, ...]:
        """The command that evaluates it at its best validation epoch, and its stored heatmaps."""
        words = ["python", "-m", "bigscl.evaluate", str(self.folder), "-o", str(self.report.parent)]
        words += ["--workers", "1"]
        if self.test:
            words += ["--shards", *self.test]
        if self.boxes and self.resolved().store.kind == "disk":
            words += ["--heatmaps"]
        return tuple(words)


def plan_trials(
    out: Path,
    configs: Sequence[Path],
    variants: Sequence[str],
    seeds: Sequence[int],
    settings: Sequence[str],
    *,
    redraw: bool = True,
    test: Sequence[str] = (),
    boxes: bool = True,
) -> list[Trial]:
    """Every run, seed by seed, so that what is there early can be compared; all checked before one runs.

    With `redraw`, each seed draws the observed labels anew, where training sees part of the labels only.
    """
    trials = []
    for seed in seeds:
        for config in configs:
            for variant in variants:
                drawn = [f"data.observed.seed={seed}"] if redraw and _observes(config) else []
                trial = _trial(out, config, variant, seed, [*drawn, *settings])
                trial = replace(trial, test=tuple(test), boxes=boxes)
                trial.check_unchanged()
                trials.append(trial)
    folders = [trial.folder for trial in trials]
    if twice := {str(folder) for folder in folders if folders.count(folder) > 1}:
        raise ValueError(f"two runs would share a folder: {', '.join(sorted(twice))}")
    return trials


def _trial(out: Path, config: Path, variant: str, seed: int, settings: Sequence[str]) -> Trial:
    folder = out / "-".join(filter(None, [config.stem, _slug(variant)])) / f"seed-{seed}"
    words = [f"--run={folder}", f"--seed={seed}"]
    words += [_setting(word) for word in (*settings, *_split(variant))]
    return Trial(config=config, variant=variant, seed=seed, folder=folder, settings=tuple(words))


def _split(variant: str) -> list[str]:
    try:
        return shlex.split(variant)
    except ValueError as error:
        raise ValueError(
            f"--vary {variant!r}: {error}. Expected 'KEY=VALUE ...', quoted as in a shell."
        ) from None


def _slug(text: str) -> str:
    """The text as part of a file's name."""
    return re.sub(r"[^\w.=-]+", "_", text).strip("_")


def _observes(config: Path) -> bool:
    """Whether training sees part of the labels only, so that another part can be drawn."""
    from bigscl.config import load_config

    return load_config(config).data.labels == "observed"


def _setting(word: str) -> str:
    key, equals, _ = word.partition("=")
    if not equals or not key:
        raise ValueError(f"--set, --vary: {word!r}, expected KEY=VALUE, as store.momentum=0.5")
    return f"--{word}"


def _check_boxes(trials: Sequence[Trial]) -> None:
    """Find out now, not after the first training, that there is nothing to judge heatmaps by."""
    from bigscl.data.reader import read_metadata
    from bigscl.training.run import open_data

    for trial in trials[:1]:
        index = open_data(trial.resolved()).train
        found = read_metadata(index, index.ids()[:SAMPLES_TO_LOOK_AT])
        if trial.boxes and not any(fields.get("boxes") for fields in found.values()):
            raise ValueError(
                f"{index.urls[0]}: its first {len(found)} samples have no `boxes` in their json, by which "
                f"heatmaps are judged. Add --no-boxes to leave that out."
            )


def _run_and_report(trials: Sequence[Trial], parallel: int, out: Path) -> None:
    """Do what is left, show the table, and say what is not in it: by name, and by the exit code."""
    try:
        failures = _run_all(trials, parallel, out)
    except KeyboardInterrupt:
        typer.echo("stopped; what was running is saved. The same command goes on from there.", err=True)
        raise typer.Exit(130) from None
    from bigscl.tools.study_report import write_results

    typer.echo("\n" + write_results(trials, out))
    if failures:
        lines = [f"\n{len(failures)} of {len(trials)} runs are not in the table:", *failures]
        typer.echo("\n".join(lines), err=True)
        raise typer.Exit(1)


def _run_all(trials: Sequence[Trial], parallel: int, out: Path) -> list[str]:
    """Do what is left of the runs; gives back what went wrong. One that fails does not stop the others."""
    from bigscl.tools.study_report import write_results

    left = [trial for trial in trials if not trial.done]
    _check_boxes(left)
    out.mkdir(parents=True, exist_ok=True)
    places: SimpleQueue[int] = SimpleQueue()
    for place in range(parallel):
        places.put(place)
    failures = []
    # Those that wait in the pool are given up first when it is left; then what runs is told to stop.
    with (
        ThreadPoolExecutor(parallel) as pool,
        Runner() as runner,
        progress("study", len(left), "runs") as advance,
    ):
        waiting = {pool.submit(_run, trial, runner, places, parallel > 1): trial for trial in left}
        try:
            for future in as_completed(waiting):
                error = future.exception()
                if isinstance(error, ValueError):
                    failures.append(str(error))
                    typer.echo(str(error), err=True)
                else:
                    future.result()
                    write_results(trials, out)
                advance(1, waiting[future].row)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failures


def _run(trial: Trial, runner: Runner, places: "SimpleQueue[int]", quiet: bool) -> None:
    """What is left to do of a run, in one of the places that there are for runs."""
    place = places.get()
    log = trial.folder / "log.txt" if quiet else None
    variables = _own_gpu(place) if quiet else {}
    try:
        if not trial.trained:
            started = time.monotonic()
            _show(trial.training(), log)
            try:
                runner.run(trial.training(), log=log, variables=variables)
            finally:
                _note_time(trial, time.monotonic() - started)
            (trial.folder / "done").touch()
        _show(trial.evaluation(), log)
        runner.run(trial.evaluation(), log=log, variables=variables)
    finally:
        places.put(place)


def _show(words: Sequence[str], log: Path | None) -> None:
    typer.echo(f"$ {shlex.join(words)}" + (f" >> {log}" if log is not None else ""))


def _note_time(trial: Trial, seconds: float) -> None:
    """One line for every attempt: a run that was stopped and went on took their sum."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    with (trial.folder / "seconds.txt").open("a") as file:
        file.write(f"{seconds:.1f}\n")


def _own_gpu(place: int) -> dict[str, str]:
    """Where there are several GPUs, runs at the same time take one each."""
    import torch

    count = torch.cuda.device_count()
    return {"CUDA_VISIBLE_DEVICES": str(place % count)} if count > 1 else {}
