"""The end of an epoch at any number of ranks, measured in one process: stages, bytes, and how long GPUs wait.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.epoch_end --ranks 8 128
    OMP_NUM_THREADS=1 python -m tests.benchmarks.epoch_end --ranks 128 --classes 21000 --images 14200000

This process is rank 0, with the project's own code and as many scores as one rank has. What the other
ranks send is made from what rank 0 sends, with ids and shards of their own, outside of the clock: ranks are
alike. `before` merges the keys and computes the metrics of all classes on rank 0, and reads shards one by
one; `after` is the project as it is, with the classes of the metrics divided over the ranks. CPU seconds are
measured. A stall is computed: CPU seconds over the threads of a stage, and bytes over rank 0's network. `~`
marks what was measured for a part only and multiplied; the last line of a table says which part. The
prediction of the validation images is not in it.
"""

import argparse

from bigscl.tools.shared.terminal import size, table
from tests.benchmarks.epoch_end_stages import SHARDS_ON_DISK, Size, Stage, measure

SHARED = (
    *("images", "classes", "positives_per_image", "val_images"),
    *("backbone", "heatmap_size", "cores", "most_scores"),
)
"""Options that are fields of `Size`."""


def report_lines(run: Size, stages: list[Stage], images_per_second: float) -> str:
    """Return the table of a size, and how long the GPUs are idle."""
    rows = []
    for stage in stages:
        cells = [stage.name]
        for cost in (stage.before, stage.after):
            about = "~" if cost.is_scaled else ""
            cells += [f"{about}{cost.cpu:.2f}", f"{about}{cost.stall(run):.2f}", size(cost.received)]
        rows.append(cells)
    totals = [sum(getattr(stage, when).stall(run) for stage in stages) for when in ("before", "after")]
    received = [sum(getattr(stage, when).received for stage in stages) for when in ("before", "after")]
    rows.append(["all", "", f"{totals[0]:.2f}", size(received[0]), "", f"{totals[1]:.2f}", size(received[1])])
    training = run.images / run.ranks / images_per_second
    idle = [f"{total / (total + training):.0%}" for total in totals]
    heads = ("stage", "before: CPU s", "stall s", "to rank 0", "after: CPU s", "stall s", "to rank 0")
    return "\n".join(
        [
            f"{run.ranks} ranks, {run.images:,} x {run.classes:,}, {run.val_images:,} images to validate",
            table(heads, rows, indent="  "),
            f"  an epoch trains for {training:.1f} s at {images_per_second:g} images/s a rank: GPUs are idle "
            f"for {idle[0]} of the time before, {idle[1]} after",
            f"  ~ scaled: {run.ranked_shards} of {run.shards_of_rank} shards of the rank were ranked, "
            f"{min(SHARDS_ON_DISK, run.shards_of_rank)} were read",
        ]
    )


def main(arguments: list[str] | None = None) -> None:
    """Print a table for each number of ranks."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 128])
    parser.add_argument("--images", type=int, default=1_281_167)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--positives-per-image", type=float, default=1.2)
    parser.add_argument("--val-images", type=int, default=50_000)
    parser.add_argument("--backbone", default="resnet50")
    parser.add_argument("--heatmap-size", type=int, default=14)
    parser.add_argument("--cores", type=int, default=8, help="cores of a rank")
    parser.add_argument("--gbit", type=float, default=25, help="network of rank 0")
    parser.add_argument("--images-per-second", type=float, default=3125, help="training speed of a rank")
    parser.add_argument("--most-scores", type=int, default=200_000_000, help="ranked by this process")
    options = parser.parse_args(arguments)
    for ranks in options.ranks:
        run = Size(
            ranks=ranks,
            bytes_per_second=options.gbit * 1e9 / 8,
            **{name: getattr(options, name) for name in SHARED},
        )
        print(report_lines(run, measure(run), options.images_per_second), flush=True)


if __name__ == "__main__":
    main()
