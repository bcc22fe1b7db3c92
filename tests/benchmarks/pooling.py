"""What map pooling adds to evaluation: the network alone, and with its maps and their pooling, side by side.

    python -m tests.benchmarks.pooling

Batches of the evaluation's size, one thread. Batches alternate, so that both see the same load of the machine.
"""

import statistics
import time

import torch

from bigscl.evaluation.inference import NETWORK_BATCH
from bigscl.models.map_pooling import map_pooled
from bigscl.models.spatial import build_model

CASES = (("resnet50", 1000), ("resnet18", 1000), ("resnet18", 20))
ROUNDS = 7


def seconds(work) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


@torch.inference_mode()
def main() -> None:
    """Print milliseconds per image and the median of the ratios."""
    torch.set_num_threads(1)
    for backbone, num_classes in CASES:
        model = build_model(backbone, num_classes).eval()
        images = torch.rand(NETWORK_BATCH, 3, 224, 224).contiguous(memory_format=torch.channels_last)
        plain, both = [], []
        for _ in range(ROUNDS + 1):
            plain.append(seconds(lambda: model(images, maps=False)))
            both.append(seconds(lambda: map_pooled(model(images, maps=True), "logits")))
        # The first round warms up.
        ratio = statistics.median(b / a for a, b in zip(plain[1:], both[1:], strict=True))
        each = [1000 * min(times) / NETWORK_BATCH for times in (plain, both)]
        print(
            f"{backbone}, {num_classes} classes: {each[0]:.1f} and {each[1]:.1f} ms per image, ratio {ratio:.3f}"
        )


if __name__ == "__main__":
    main()
