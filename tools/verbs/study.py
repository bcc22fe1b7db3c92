"""Train and compare configs over several seeds."""

import shlex
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import typer

from bigscl.common.user_error import UserError
from bigscl.config import load_config
from bigscl.data.index import load_index
from bigscl.data.read_samples import read_metadata
from bigscl.evaluation.evaluate_options import Pooling
from bigscl.tools.shared.running import Runner, Trial, slug
from bigscl.tools.shared.terminal import progress

SAMPLES_TO_LOOK_AT = 100


def command(
    out: Annotated[Path, typer.Argument(help="Folder for the runs and the results.")],
    configs: Annotated[list[Path], typer.Argument(help="Configs to compare; the first is the baseline.")],
    seeds: Annotated[
        int, typer.Option(min=1, max=1000, help="Number of seeds per config, starting with --first-seed.")
    ] = 3,
    first_seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="First seed of training and of the given labels.")
    ] = 0,
    same_labels: Annotated[
        bool, typer.Option("--same-labels", help="Use the same given labels for all seeds.")
    ] = False,
    vary: Annotated[
        list[str] | None,
        typer.Option(
            metavar="'KEY=VALUE ...'",
            help="Additional variant of every config, for an ablation; may be repeated.",
        ),
    ] = None,
    only_varied: Annotated[
        bool, typer.Option("--only-varied", help="Run only the variants, not the configs themselves.")
    ] = False,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Setting of all runs; may be repeated."),
    ] = None,
    test: Annotated[
        list[str] | None,
        typer.Option(help="Shards to evaluate on; may be repeated. Default: the validation shards."),
    ] = None,
    no_boxes: Annotated[
        bool, typer.Option("--no-boxes", help="Skip the pointing game, for shards without boxes.")
    ] = False,
    pooling: Annotated[
        Pooling, typer.Option(help="map: a second table, of the same runs with map pooling.")
    ] = "plain",
    parallel: Annotated[
        int, typer.Option(min=1, max=1000, help="Runs at a time, at most one per core or GPU; see log.txt.")
    ] = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print the commands, and run nothing.")] = False,
) -> None:
    """Train and evaluate each config with several seeds, and compare the results.

    Each seed draws its own given labels, except with --same-labels. Run the same command again to resume,
    even in the middle of a run. Writes results.md, results.json and pictures (scores, curves, heatmaps).
    Example of an ablation:

    bigscl study runs/momentum configs/voc12_lite0_scl.yaml --vary store.momentum=0.5
    """
    variants = [*([] if only_varied else [""]), *(vary or [])]
    if not variants:
        raise UserError("--only-varied: needs at least one --vary")
    trials = plan_trials(
        out,
        configs,
        variants,
        range(first_seed, first_seed + seeds),
        settings or [],
        redraw=not same_labels,
        test=test or [],
        boxes=not no_boxes,
        pooling=pooling,
    )
    if dry_run:
        for trial in trials:
            typer.echo(f"{shlex.join(trial.training())}\n{shlex.join(trial.evaluation())}")
        return
    _run_and_report(trials, parallel, out)


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
    pooling: Pooling = "plain",
) -> list[Trial]:
    """Return all runs, ordered by seed so that early results can be compared; all are checked first.

    With `redraw`, each seed draws its own given labels, if training sees only a part of the labels.
    """
    trials = []
    for seed in seeds:
        for config in configs:
            for variant in variants:
                # Another part can be drawn if training sees only a part of the labels.
                draws = redraw and load_config(config).data.labels == "given"
                drawn = [f"data.given.seed={seed}"] if draws else []
                trial = _trial(out, config, variant, seed, [*drawn, *settings])
                trial = replace(trial, test=tuple(test), boxes=boxes, pooling=pooling)
                trial.check_unchanged()
                trials.append(trial)
    folders = [trial.folder for trial in trials]
    if twice := {str(folder) for folder in folders if folders.count(folder) > 1}:
        raise UserError(f"two runs would share a folder: {', '.join(sorted(twice))}")
    return trials


def _trial(out: Path, config: Path, variant: str, seed: int, settings: Sequence[str]) -> Trial:
    folder = out / "-".join(filter(None, [config.stem, slug(variant)])) / f"seed-{seed}"
    words = [f"--run={folder}", f"--seed={seed}"]
    words += [_setting(word) for word in (*settings, *_split(variant))]
    return Trial(config=config, variant=variant, seed=seed, folder=folder, settings=tuple(words))


def _split(variant: str) -> list[str]:
    try:
        return shlex.split(variant)
    except ValueError as error:
        raise UserError(
            f"--vary {variant!r}: {error}. Expected 'KEY=VALUE ...', quoted as in a shell."
        ) from None


def _setting(word: str) -> str:
    key, equals, _ = word.partition("=")
    if not equals or not key:
        raise UserError(f"--set, --vary: {word!r}, expected KEY=VALUE, as store.momentum=0.5")
    return f"--{word}"


def _check_data(trials: Sequence[Trial]) -> None:
    """Refuse shards without the labels or boxes that are needed before the first training, not after it."""
    for trial in trials[:1]:
        data = trial.resolved().data
        index = load_index(data.train, data.train_index)
        if data.given is not None and index.full is None:
            raise UserError(
                f"{index.urls[0]}: each seed draws its own given labels from the full ones, which these "
                f"shards do not carry. Add --same-labels to train all seeds on the labels that they have."
            )
        metadata = read_metadata(index, index.ids()[:SAMPLES_TO_LOOK_AT])
        if any(fields.get("boxes") for fields in metadata.values()):
            return
        if trial.boxes:
            raise UserError(
                f"{index.urls[0]}: its first {len(metadata)} samples have no `boxes` in their json, which "
                f"the pointing game needs. Add --no-boxes to skip it."
            )


def _run_and_report(trials: Sequence[Trial], parallel: int, out: Path) -> None:
    """Run what is not finished, print the table, and name the runs that failed (exit code 1)."""
    from bigscl.tools.shared.study_report import write_results

    report = partial(write_results, trials, out)
    try:
        failures = _run_all(trials, parallel, out, report)
    except KeyboardInterrupt:
        typer.echo("stopped; the current runs are saved. Resume with the same command.", err=True)
        raise typer.Exit(130) from None
    typer.echo("\n" + report())
    if failures:
        lines = [f"\n{len(failures)} of {len(trials)} runs are not in the table:", *failures]
        typer.echo("\n".join(lines), err=True)
        raise typer.Exit(1)


def _run_all(trials: Sequence[Trial], parallel: int, out: Path, report: Callable[[], str]) -> list[str]:
    """Run what is not finished and return the failures. A run that fails does not stop the others."""
    left = [trial for trial in trials if not trial.done]
    _check_data(left)
    out.mkdir(parents=True, exist_ok=True)
    places: SimpleQueue[int] = SimpleQueue()
    for gpu in range(parallel):
        places.put(gpu)
    failures = []
    # On an error, waiting runs are cancelled first, then the current ones are asked to stop.
    with (
        ThreadPoolExecutor(parallel) as pool,
        Runner() as runner,
        progress("study", len(left), "runs") as advance,
    ):
        waiting = {pool.submit(_run, trial, runner, places, parallel > 1): trial for trial in left}
        try:
            for future in as_completed(waiting):
                error = future.exception()
                if isinstance(error, UserError):
                    failures.append(str(error))
                    typer.echo(str(error), err=True)
                else:
                    future.result()
                    report()
                advance(1, waiting[future].row)
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return failures


def _run(trial: Trial, runner: Runner, places: "SimpleQueue[int]", quiet: bool) -> None:
    """Train and evaluate a run, as far as it is not finished, in one of the parallel places."""
    gpu = places.get()
    log = trial.folder / "log.txt" if quiet else None
    variables = _own_gpu(gpu) if quiet else {}
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
        places.put(gpu)


def _show(words: Sequence[str], log: Path | None) -> None:
    typer.echo(f"$ {shlex.join(words)}" + (f" >> {log}" if log is not None else ""))


def _note_time(trial: Trial, seconds: float) -> None:
    """Append the time of this attempt: a run that was resumed took the sum of its attempts."""
    trial.folder.mkdir(parents=True, exist_ok=True)
    with (trial.folder / "seconds.txt").open("a") as file:
        file.write(f"{seconds:.1f}\n")


def _own_gpu(place: int) -> dict[str, str]:
    """Give each of the parallel runs its own GPU, if there are several."""
    import torch

    count = torch.cuda.device_count()
    return {"CUDA_VISIBLE_DEVICES": str(place % count)} if count > 1 else {}
