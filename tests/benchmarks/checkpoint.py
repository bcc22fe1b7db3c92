"""How long writing weights keeps other threads from running, beside `safetensors.torch.save`.

    OMP_NUM_THREADS=1 python -m tests.benchmarks.checkpoint [--megabytes 315] [--repeats 5]

A thread that sleeps for a millisecond at a time notes when it wakes up late; the figure is the sum of delays
of more than 10 ms, the smallest of the repeats, which take turns. A busy machine adds delays of its own.
"""

import argparse
import tempfile
import threading
import time
from pathlib import Path

import torch
from safetensors.torch import save

from bigscl.common.digests import DigestingFile
from bigscl.training.checkpoint_folder import write_tensors

TICK_SECONDS, LATE_SECONDS = 0.001, 0.01


def late_seconds(action):
    """The seconds for which a thread beside the action was late, and those of the action, wall and CPU."""
    delays, is_over = [], threading.Event()

    def tick():
        last = time.perf_counter()
        while not is_over.is_set():
            time.sleep(TICK_SECONDS)
            now = time.perf_counter()
            delays.append(now - last - TICK_SECONDS)
            last = now

    thread = threading.Thread(target=tick)
    thread.start()
    time.sleep(10 * TICK_SECONDS)
    began, cpu = time.perf_counter(), time.process_time()
    action()
    seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
    is_over.set()
    thread.join()
    return sum(delay for delay in delays if delay > LATE_SECONDS), seconds, cpu


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, default=315)
    parser.add_argument("--repeats", type=int, default=5)
    arguments = parser.parse_args()
    # Layers of 4 MB: the sizes of a network's weights.
    tensors = {f"layer{n}.weight": torch.randn(1000, 1000) for n in range(-(-arguments.megabytes // 4))}
    writers = {"safetensors.save": lambda file: file.write(save(tensors)), "ours": write_tensors(tensors)}
    found = {name: [] for name in writers}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.repeats):
            contents = []
            for name, write in writers.items():
                with (Path(folder) / name).open("wb") as file:
                    found[name].append(
                        late_seconds(lambda write=write, file=file: write(DigestingFile(file)))
                    )
                contents.append((Path(folder) / name).read_bytes())
            assert contents[0] == contents[1], "the files differ"
    for name, rows in found.items():
        late, seconds, cpu = (min(column) for column in zip(*rows, strict=True))
        print(f"{name:17} other threads late by {late:6.3f} s; {seconds:6.2f} s wall, {cpu:5.2f} s CPU")


if __name__ == "__main__":
    main()
