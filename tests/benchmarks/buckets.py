"""What it costs to fix the order in which DDP adds up gradients: `python -m tests.benchmarks.buckets`.

Two processes (gloo) train ResNet-18. Steps of three copies take turns, so that all meet the same noise: DDP
as it is; after one backward of nothing, as `bigscl.training.step` settles the buckets; and with
`find_unused_parameters`, which never packs again. A copy's times are medians over its steps, on the clock and
of the CPU.
"""

import argparse
import statistics
import time

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchvision.models import resnet18


def step_seconds(model: nn.Module, images: torch.Tensor) -> tuple[float, float]:
    """(seconds, CPU seconds) of a step."""
    started, cpu = time.perf_counter(), time.process_time()
    model.zero_grad()
    model(images).sum().backward()
    return time.perf_counter() - started, time.process_time() - cpu


def settled(model: nn.Module, side: int) -> tuple[nn.Module, float]:
    """The model after a backward of nothing, and the seconds that took."""
    started = time.perf_counter()
    (model.eval()(torch.zeros(1, 3, side, side)).sum() * 0.0).backward()
    return model.train(), time.perf_counter() - started


def measure(rank: int, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{options.port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=options.processes)
    torch.manual_seed(0)
    plain = DistributedDataParallel(resnet18())
    calmed, once = settled(DistributedDataParallel(resnet18()), options.size)
    models = {
        "DDP": plain,
        "settled": calmed,
        "find_unused_parameters": DistributedDataParallel(resnet18(), find_unused_parameters=True),
    }
    images = torch.rand(options.batch, 3, options.size, options.size)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in models}
    for place in range(options.steps + 3):
        for name, model in models.items():
            taken = step_seconds(model, images)
            if place >= 3:
                seconds[name].append(taken)
    if rank == 0:
        report(seconds, once)
    dist.destroy_process_group()


def report(seconds: dict[str, list[tuple[float, float]]], once: float) -> None:
    medians = {
        name: [statistics.median(each) for each in zip(*seconds[name], strict=True)] for name in seconds
    }
    for name, (wall, cpu) in medians.items():
        ratios = f"{wall / medians['DDP'][0]:6.3f} on the clock, {cpu / medians['DDP'][1]:6.3f} of the CPU"
        print(f"{name:24} {wall * 1000:8.1f} ms, {cpu * 1000:8.1f} CPU ms per step; ratios {ratios}")
    print(f"settling, once per phase and resume: {once * 1000:.1f} ms")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--port", type=int, default=29517)
    options = parser.parse_args()
    torch.multiprocessing.spawn(measure, (options,), nprocs=options.processes)


if __name__ == "__main__":
    main()
