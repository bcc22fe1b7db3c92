"""What map pooling adds to evaluation: the network alone, and with its maps and their pooling, side by side.

    python -m tests.benchmarks.pooling

Batches of the evaluation's size, one thread. They alternate, so that both see the same load of the machine.
"""

import statistics
import time

import torch

from bigscl.evaluation.inference import NETWORK_BATCH
from bigscl.models.spatial import build_model, map_pooled

CASES = (("resnet50", 1000), ("resnet18", 1000), ("resnet18", 20))
ROUNDS = 7


def seconds(work, *inputs) -> float:
    """Return how long a call takes."""
    started = time.perf_counter()
    work(*inputs)
    return time.perf_counter() - started


def measure(backbone: str, num_classes: int) -> None:
    """Print milliseconds per image and the median of the ratios."""
    model = build_model(backbone, num_classes).eval()
    images = torch.rand(NETWORK_BATCH, 3, 224, 224).contiguous(memory_format=torch.channels_last)
    plain, both = [], []
    for _ in range(ROUNDS + 1):
        plain.append(seconds(model, images, False))
        both.append(seconds(lambda: map_pooled(model(images, maps=True), "logits")))
    # The first round warms up.
    ratio = statistics.median(b / a for a, b in zip(plain[1:], both[1:], strict=True))
    each = " and ".join(f"{1000 * min(times) / NETWORK_BATCH:.1f}" for times in (plain, both))
    print(f"{backbone}, {num_classes} classes: {each} ms per image, ratio {ratio:.3f}")


if __name__ == "__main__":
    torch.set_num_threads(1)
    with torch.inference_mode():
        for case in CASES:
            measure(*case)
