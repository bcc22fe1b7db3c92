"""A training step with EN + SCL and its memory beside the same step with AN and none, data excluded.

    python -m tests.benchmarks.step                         # ResNet-50 at 224, 1000 classes, top-10
    python -m tests.benchmarks.step --batch 64 --precision bf16 --json

Four steps take turns in one process: `an` (the network as its library wrote it), `an + maps` (the same loss
through the spatial head), `en + scl` (heatmaps seen through the view, expected positives, EN + SCL, their
running averages and those of the scores) and `scl plus` (the same with ENP, corrected targets, looks, and the
spatial ranking). Each is a forward, a backward and an Adam step.

On the CPU time is processor time, on a GPU wall time between synchronisations. Other load only ever adds to
it, so steps are compared by their best rounds; the median over rounds of the ratio within a round stands
beside that, and the two agree on a quiet machine. On a busy one both are off by several percent, so what
differs between the steps is also timed alone, from the last features to their gradient, many times over.

On a busy CPU (3 rounds, in brackets by what differs): an + maps 1.033 (1.021) of an, en + scl 1.023 (1.022),
scl plus 1.021 (1.023): the spatial head costs 2%, all the rest nothing that shows. No GPU has been measured.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from bigscl.config import StoreConfig
from bigscl.losses.cross_entropy import probabilities
from bigscl.losses.objective import Objective
from bigscl.losses.registry import LossInputs
from bigscl.memory.heatmaps import blend, blend_scores, gather_classes, to_view
from bigscl.memory.lookup import GivenClasses, MemoryBatch, updated_averages
from bigscl.models.head import Tap
from bigscl.models.spatial import SpatialClassifier, build_model, pool
from bigscl.selection.thresholds import Thresholds
from bigscl.store import Annotations

MOMENTUM = 0.8
BAR = 1.05
TAIL_REPEATS = 20


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """A batch and what the store remembers of it, on the device."""

    images: Tensor
    labels: Tensor
    ids: Tensor
    views: Tensor
    scores: Tensor
    classes: Tensor
    heatmaps: Tensor
    selection: Thresholds
    stored: MemoryBatch


def make_inputs(options: argparse.Namespace, side: int, device: torch.device) -> Inputs:
    """Random images and memory of the right shapes; every image has one positive."""
    torch.manual_seed(0)
    batch, num_classes = options.batch, options.classes
    labels = torch.full((batch, num_classes), -1, dtype=torch.int8)
    labels[torch.arange(batch), torch.randint(num_classes, (batch,))] = 1
    scores = torch.rand(batch, num_classes).half()
    extent = 0.5 + 0.5 * torch.rand(batch, 2)
    flips = torch.randint(2, (batch, 1)).float()
    annotations = Annotations.of((labels == 1).nonzero()[:, 1:].tolist(), num_classes)
    cuts = Thresholds(
        score=torch.full((num_classes,), 0.99).half(), tie_id=torch.full((num_classes,), -1)
    ).to(device)
    shared = {
        "ids": torch.arange(batch).to(device),
        "views": torch.cat([(1 - extent) * torch.rand(batch, 2), extent, flips], 1).to(device),
    }
    arrays = {
        "scores": scores.to(device),
        "classes": scores.float().topk(options.top, 1).indices.to(device),
        "heatmaps": torch.rand(batch, options.top, 2 * side, 2 * side).half().to(device),
    }
    stored = MemoryBatch(
        **shared,
        rows=np.arange(batch),
        erased=None,
        selection=replace(cuts, pseudo_positives=cuts),
        arrays={
            **arrays,
            "sample_visits": torch.full((batch,), 5, dtype=torch.uint8).to(device),
            "cell_visits": torch.randint(6, (batch, 2 * side, 2 * side), dtype=torch.uint8).to(device),
            "spatial_score": torch.rand(batch, options.top).half().to(device),
        },
        annotations=GivenClasses(annotations, device),
        momentum=MOMENTUM,
    )
    return Inputs(
        images=torch.randn(batch, 3, options.size, options.size)
        .to(device)
        .to(memory_format=torch.channels_last),
        labels=labels.to(device),
        selection=cuts,
        stored=stored,
        **shared,
        **arrays,
    )


class Steps:
    """The steps under test, each with a model and an optimizer of its own."""

    def __init__(self, options: argparse.Namespace, device: torch.device) -> None:
        self.device = device
        self.autocast = options.precision == "bf16"
        self.models: dict[str, SpatialClassifier] = {}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        for name in ("an", "an + maps", "en + scl", "scl plus"):
            torch.manual_seed(0)
            model = build_model(options.model, options.classes).to(device).train()
            self.models[name] = model.to(memory_format=torch.channels_last)
            self.optimizers[name] = torch.optim.Adam(model.parameters(), lr=1e-5, weight_decay=1e-4)
        noise = torch.randn(options.batch, 3, options.size, options.size, device=device)
        self.features = last_features(model, noise.to(memory_format=torch.channels_last)).requires_grad_()
        self.inputs = make_inputs(options, self.features.shape[-1], device)

    def run(self, name: str) -> None:
        """One training step."""
        model, optimizer, inputs = self.models[name], self.optimizers[name], self.inputs
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            logit_map, logits = model(inputs.images, maps=name != "an")
        optimizer.zero_grad()
        self.loss(name, logit_map, logits).mean().backward()
        optimizer.step()

    def run_tail(self, name: str) -> None:
        """What follows the last features, and their gradient: all in which the steps differ."""
        model = self.models[name]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.autocast):
            if name == "an":
                logit_map, logits = None, model.head.linear(model.network)(self.features.mean((2, 3)))
            else:
                logit_map = model.head.logit_map(
                    model.network, self.features, self.inputs.images, training=True
                )
                logits = pool(logit_map)
        self.loss(name, logit_map, logits).mean().backward()

    def loss(self, name: str, logit_map: Tensor | None, logits: Tensor) -> Tensor:
        """The loss of each sample; with EN + SCL against the memory, which it updates."""
        inputs = self.inputs
        if name == "scl plus":
            maps = probabilities(logit_map)
            given = inputs.stored.inputs(logits, inputs.labels, maps, corrected=True)
            loss = Objective(base="enp", consistency="scl_corrected")(given)
            updated_averages(inputs.stored, logits.detach(), maps.detach(), StoreConfig())
            return loss.total
        if name != "en + scl":
            given = LossInputs(logits=logits, labels=inputs.labels)
            return Objective(base="an", consistency="none")(given).total
        target = to_view(inputs.heatmaps, inputs.views, logit_map.shape[-1])
        given = LossInputs(
            logits=logits,
            labels=inputs.labels,
            maps=probabilities(logit_map),
            target=target,
            classes=inputs.classes,
            expected=inputs.selection.expected(inputs.scores, inputs.ids),
        )
        loss = Objective()(given)
        kept = gather_classes(given.maps, inputs.classes)
        blend(inputs.heatmaps, kept, inputs.views, MOMENTUM)
        blend_scores(inputs.scores, logits.detach().sigmoid(), MOMENTUM)
        return loss.total


def last_features(model: SpatialClassifier, images: Tensor) -> Tensor:
    """The feature map the network would pool."""
    tap = Tap()
    handle = tap.attach(model.network.get_submodule(model.head.tapped), model.head.side)
    with torch.no_grad():
        model.network(images)
    handle.remove()
    return tap.take()


def measure(action: Callable[[], None], device: torch.device) -> float:
    """Seconds an action takes."""
    if device.type == "cpu":
        start = time.process_time()
        action()
        return time.process_time() - start
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    action()
    torch.cuda.synchronize(device)
    return time.perf_counter() - start


def compare(steps: Steps, repeats: int) -> dict[str, dict[str, float]]:
    """Best seconds of each step, and their ratio to `an`: by best rounds, by the tails, within a round."""
    names = list(steps.models)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for round_number in range(-1, repeats):
        # Each round starts with another step, so that none always runs on a warmer machine.
        shift = round_number % len(names)
        for name in names[shift:] + names[:shift]:
            took = measure(lambda name=name: steps.run(name), steps.device)
            if round_number >= 0:
                seconds[name].append(took)
    tails = {
        name: min(measure(lambda name=name: steps.run_tail(name), steps.device) for _ in range(TAIL_REPEATS))
        for name in names
    }
    return {
        name: {
            "seconds": min(taken),
            "ratio": min(taken) / min(seconds["an"]),
            "tail_ratio": 1 + (tails[name] - tails["an"]) / min(seconds["an"]),
            "median_ratio": statistics.median(a / b for a, b in zip(taken, seconds["an"], strict=True)),
        }
        for name, taken in seconds.items()
    }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", default="resnet50", help="as in a config's backbone")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, default=224, help="side of the images")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--top", type=int, default=10, help="classes with a heatmap")
    parser.add_argument("--repeats", type=int, default=7, help="rounds, after one to warm up")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--device", choices=["cpu", "cuda"], action="append", help="default: all there are")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def main() -> None:
    options = parse()
    devices = options.device or (["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"])
    results = {}
    for device in devices:
        results[device] = compare(Steps(options, torch.device(device)), options.repeats)
    if options.json:
        print(json.dumps({"options": vars(options), "results": results}))
        return
    for device, rows in results.items():
        print(f"{options.model}, batch {options.batch}, {options.size} px, {options.precision}, {device}")
        for name, row in rows.items():
            print(
                f"  {name:10} {1000 * row['seconds']:9.1f} ms  {row['ratio']:.3f} of an "
                f"(median of rounds {row['median_ratio']:.3f}, by what differs {row['tail_ratio']:.3f})"
            )
        for name in ("en + scl", "scl plus"):
            verdict = "within" if rows[name]["ratio"] <= BAR else "OVER"
            print(f"  {name} is {verdict} the bar of {BAR:.2f}")


if __name__ == "__main__":
    main()
