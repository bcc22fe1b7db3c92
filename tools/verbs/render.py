"""Draw samples with their heatmaps."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import typer
from numpy.typing import NDArray

from bigscl.common.command_line import AsJson
from bigscl.common.user_error import UserError
from bigscl.evaluation.sample_plots import SampleImages, draw_samples, over_epochs, side_by_side
from bigscl.store import HeatmapStore
from bigscl.tools.shared.find_samples import find_class, find_samples
from bigscl.tools.shared.open_store import AtSnapshot, Data, DataFlags, StorageFlags, Store, open_store
from bigscl.tools.shared.shard_passes import expected_at
from bigscl.tools.shared.terminal import print_result
from bigscl.tools.viewer.open_run import OpenRun, Places
from bigscl.tools.viewer.score_index import Query, listed

SUFFIXES = (".png", ".pdf", ".svg", ".jpg")

Choice = Literal["random", "tracked", "most-changed", "confident"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceFlags:
    """Which samples are drawn, if none is named."""

    choose: Annotated[
        Choice,
        typer.Option(
            help="How to choose samples: random; tracked; most-changed: largest change of a score since the "
            "previous snapshot; confident: highest score of a class that is not annotated."
        ),
    ] = "random"
    class_name: Annotated[
        str | None, typer.Option("--class", help="Choose by this class only, by name or number.")
    ] = None
    count: Annotated[
        int | None,
        typer.Option(min=1, max=10_000, help="Number of samples to choose. Default: 8; with --epochs: 2."),
    ] = None
    seed: Annotated[int, typer.Option(min=0, max=2**32 - 1, help="Seed of the random choice.")] = 0


def command(
    store: Store,
    output: Annotated[Path, typer.Option("--output", "-o", help="Output file: .png, .pdf, .svg or .jpg.")],
    *,
    flags: ChoiceFlags,
    sample: Annotated[
        list[str] | None, typer.Option(help="Sample to draw, by key or id; may be repeated.")
    ] = None,
    heatmaps: Annotated[
        int | None,
        typer.Option(
            min=1, max=1000, help="Number of heatmaps per sample. Default: 6; with --epochs: 2 classes."
        ),
    ] = None,
    epochs: Annotated[
        bool,
        typer.Option("--epochs", help="Draw one row per class and one column per epoch, of tracked samples."),
    ] = False,
    against: Annotated[
        str | None,
        typer.Option(metavar="STORE", help="Second store of the same data, drawn below each sample."),
    ] = None,
    across: Annotated[int, typer.Option(min=1, max=100, help="Number of samples in a row.")] = 1,
    snapshot: AtSnapshot = None,
    source: DataFlags,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Draw samples with the heatmaps of annotated classes, of others that are present or expected, and more.

    Heatmaps show what was seen since their start: what is left of their initial values is taken out.

    Where boxes are known, the hottest cell is marked: inside or outside of them.

    Example: bigscl render runs/quickstart --choose confident --count 12 -o mined.png
    """
    if output.suffix not in SUFFIXES:
        raise UserError(f"--output {output}: pictures are written as {', '.join(SUFFIXES)}")
    run = OpenRun(
        store if snapshot is None else f"{store}@{snapshot}",
        Places(source=source, storage=storage, needed_for="render"),
    )
    opened, data = run.store, run.data
    stores = [opened] if against is None else [opened, open_store(against, None, storage, data)]
    number = None if flags.class_name is None else find_class(flags.class_name, data.index)
    choice: Choice = "tracked" if epochs else flags.choose
    if sample:
        ids = find_samples(sample, opened.spec, data.index)
    else:
        # By default the picture fits on a screen.
        ids = choose_samples(run, choice, flags.count or (2 if epochs else 8), number, flags.seed)
    if epochs and against is not None:
        raise UserError("--epochs: has no effect with --against; draw one picture for each store")
    # The expected positives are needed only if the shards do not say which classes are present.
    expected = None if data.index.full is not None else expected_at(opened)
    selected = None if expected is None else expected.expected(opened.read(ids).ranked_by(), ids)
    images = SampleImages(data.index, ids, data.annotated(ids), selected)
    draw = over_epochs if epochs else side_by_side
    pictures = draw(stores, images, ids, heatmaps or (2 if epochs else 6))
    chosen = "samples as named" if sample else _how_chosen(choice, flags.seed, flags.class_name)
    title = f"{opened.backend.url}, snapshot {opened.snapshot.id}, epoch {opened.snapshot.epoch}\n{chosen}"
    draw_samples(pictures, output, title=title, across=across)
    facts: dict[str, Any] = {
        "output": str(output),
        "chosen": chosen,
        "samples": [_named(data, int(sample_id)) for sample_id in ids],
    }
    facts |= {} if expected is None else {"selection": expected.facts()}
    note = f"\n  {expected.note}" if expected is not None and expected.recomputed else ""
    print_result(facts, f"{output}: {len(ids)} samples: {chosen}\n{_listed(facts)}{note}", as_json)


def _how_chosen(choice: Choice, seed: int, class_name: str | None) -> str:
    """Return how the samples were chosen, in a few words for the picture."""
    words = {
        "random": f"random samples, seed {seed}",
        "tracked": "tracked samples, evenly over the set",
        "most-changed": "largest change of a score since the snapshot before",
        "confident": "highest score of a class that is not annotated",
    }[choice]
    return words if class_name is None else f"{words}, class {class_name}"


def _named(data: Data, sample: int) -> dict[str, Any]:
    return {"id": sample, "name": data.index.name(sample)}


def _listed(facts: dict[str, Any]) -> str:
    return "\n".join(f"  {sample['id']:>9}  {sample['name']}" for sample in facts["samples"])


# Samples to look at


def choose_samples(
    run: OpenRun, choice: Choice, count: int, number: int | None, seed: int
) -> NDArray[np.int64]:
    """Return the ids of up to `count` samples, the most interesting first; of class `number` if given."""
    if choice == "tracked":
        return _tracked(run.store, run.data, count, number)
    if choice == "random":
        return _random(run.data, count, number, seed)
    run.update(now=True)
    assert run.index is not None
    if choice == "most-changed" and run.index.before is None:
        raise UserError(
            f"{run.store.backend.url}: snapshot {run.store.snapshot.id} is the oldest one, so there is no "
            f"change to show. Use another --choose."
        )
    query = Query(order="change" if choice == "most-changed" else "surprise", number=number)
    rows: NDArray[np.int64] = listed(run.index, query, run.data.index)["row"][:count].astype(np.int64)
    return rows


def _tracked(store: HeatmapStore, data: Data, count: int, number: int | None) -> NDArray[np.int64]:
    ids = np.array(store.spec.history_samples, np.int64)
    if not len(ids):
        raise UserError(
            f"{store.backend.url}: has no tracked samples (store.history_samples of its run is 0)"
        )
    return ids[_with_class(data, ids, number)][:count]


def _random(data: Data, count: int, number: int | None, seed: int) -> NDArray[np.int64]:
    ids = data.index.ids()
    ids = ids[_with_class(data, ids, number)]
    return np.sort(np.random.default_rng(seed).choice(ids, min(count, len(ids)), replace=False))


def _with_class(data: Data, ids: NDArray[np.int64], number: int | None) -> NDArray[np.bool_]:
    """Return which samples are annotated with the class; all, if no class is given."""
    if number is None:
        return np.ones(len(ids), bool)
    given = data.annotations.given
    rows = np.searchsorted(given.offsets, np.flatnonzero(given.values == number), side="right") - 1
    has_class = np.isin(ids, rows)
    if not has_class.any():
        raise UserError(f"--class: no sample is annotated with {data.index.class_names[number]!r}")
    return has_class
