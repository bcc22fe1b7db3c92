"""What the sum of sample counts over the ranks adds to a step: `python -m tests.benchmarks.collectives`.

The GPU computes a step while the host has nothing to do: the step is a sleep here. Steps of two kinds take
turns, so that both meet the same noise: one that sums before it computes, and one that starts the sum of the
next step, computes, and then asks for the result, as `bigscl.train` does. The time of a kind is the median
over its steps on the slowest rank, less the sleep.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing

from bigscl.distributed.ranks import GlooRanks
from tests.forks import free_port

VALUES = [64.0, 0.0, 0.0, 0.0]
"""Samples of the window, and whether to stop, to save, or to report a failure."""


def summed_first(ranks: GlooRanks, seconds: float) -> None:
    ranks.sum(VALUES)
    time.sleep(seconds)


def summed_beside(ranks: GlooRanks, seconds: float) -> None:
    result = ranks.start_sum(VALUES)
    time.sleep(seconds)
    result()


def computed_only(ranks: GlooRanks, seconds: float) -> None:
    time.sleep(seconds)


KINDS = {"no sum": computed_only, "sum, then step": summed_first, "sum beside the step": summed_beside}


def measure(rank: int, processes: int, port: int, options: argparse.Namespace, results: dict) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=processes)
    ranks, taken = GlooRanks(), {name: [] for name in KINDS}
    for place in range(options.steps + 3):
        for name, step in KINDS.items():
            started = time.perf_counter()
            step(ranks, options.milliseconds / 1000)
            if place >= 3:
                taken[name].append(time.perf_counter() - started)
    medians = torch.tensor([statistics.median(seconds) for seconds in taken.values()])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    if rank == 0:
        results[processes] = dict(zip(KINDS, medians.tolist(), strict=True))
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[2, 4, 8, 16])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--milliseconds", type=float, default=50.0, help="duration of a step on the GPU")
    options = parser.parse_args()
    with torch.multiprocessing.Manager() as manager:
        results = manager.dict()
        for processes in options.processes:
            torch.multiprocessing.spawn(measure, (processes, free_port(), options, results), nprocs=processes)
            plain, first, beside = (1000 * results[processes][name] for name in KINDS)
            print(
                f"{processes:3} processes: a step of {plain:.1f} ms takes {first - plain:.2f} ms more with "
                f"the sum before it, {beside - plain:.2f} ms more with the sum beside it",
                flush=True,
            )


if __name__ == "__main__":
    main()
