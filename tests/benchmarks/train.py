"""What the memory costs the trainer: images/s of EN + SCL with the store, beside AN without any.

    python -m tests.benchmarks.train [--backbone resnet18] [--size 224] [--images 640] [--rounds 3]

The real trainer, one process and one loader worker, on JPEGs made of scikit-learn's photographs, 1000
classes, heatmaps of the top 10. The three kinds of run take turns, so that a noisy machine hits all alike;
only epochs after the warm-up count.
"""

import argparse
import io
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

import numpy as np
import yaml
from PIL import Image

ROOT = Path(__file__).parents[2]
CLASSES, SHARD = 1000, 64
KINDS = {
    "AN, no store": {"objective": {"base": "an", "consistency": "none"}, "store": {"kind": "none"}},
    "EN + SCL, memory": {"store": {"kind": "ram", "top": 10, "warmup_heatmaps": "scores"}},
    "EN + SCL, disk": {"store": {"kind": "disk", "top": 10, "warmup_heatmaps": "scores"}},
}


def write_shards(folder: Path, images: int) -> None:
    """Photographs of ImageNet's usual size, cut at random out of scikit-learn's two."""
    from sklearn.datasets import load_sample_images

    photos = [Image.fromarray(photo) for photo in load_sample_images().images]
    rng = np.random.default_rng(0)
    (folder / "classes.txt").write_text("".join(f"class {n}\n" for n in range(CLASSES)))
    for first in range(0, images, SHARD):
        with tarfile.open(folder / f"train-{first // SHARD:06d}.tar", "w") as tar:
            for n in range(first, min(images, first + SHARD)):
                left, top = rng.integers(0, 140), rng.integers(0, 50)
                photo = photos[n % 2].crop((left, top, left + 500, top + 375))
                buffer = io.BytesIO()
                photo.save(buffer, "JPEG", quality=90)
                for suffix, data in (
                    ("jpg", buffer.getvalue()),
                    ("cls", str(rng.integers(CLASSES)).encode()),
                ):
                    info = tarfile.TarInfo(f"{n:06d}.{suffix}")
                    info.size = len(data)
                    tar.addfile(info, io.BytesIO(data))


def run(kind: str, folder: Path, number: int, args: argparse.Namespace) -> float:
    """Images/s of one run after its warm-up."""
    config = {
        "run": str(folder / f"run-{number}"),
        "data": {
            "train": str(folder / "train-*.tar"),
            "size": args.size,
            "batch_size": args.batch,
            "workers": 1,
            "shuffle_buffer": 2 * SHARD,
        },
        "model": {"backbone": args.backbone},
        "schedule": {
            "warmup": {"epochs": 1, "learning_rate": 1e-4},
            "main": {"epochs": args.epochs, "learning_rate": 1e-4},
        },
        "log": {"every_steps": 1, "trackers": [], "pictures_every": 0},
        **KINDS[kind],
    }
    if kind != "AN, no store":
        config["selection"] = {"K": 1.2}
    path = folder / f"config-{number}.yaml"
    path.write_text(yaml.safe_dump(config))
    environment = {**os.environ, "OMP_NUM_THREADS": str(args.threads), "ACCELERATE_USE_CPU": "true"}
    command = [sys.executable, "-m", "bigscl.train", str(path)]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, stderr=subprocess.DEVNULL)
    lines = (folder / f"run-{number}" / "metrics.jsonl").read_text().splitlines()
    steps = [json.loads(line) for line in lines]
    # The first step of an epoch waits for its loader to start; it is the same for all kinds, and left out.
    rates = [step["images_per_second"] for step in steps if step["kind"] == "train" and step["epoch"] >= 1]
    per_epoch = len(rates) // args.epochs
    kept = [rate for place, rate in enumerate(rates) if place % per_epoch]
    return float(1 / np.mean([1 / rate for rate in kept]))


def main() -> None:
    """The three kinds in turn, their rates and ratios."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--size", type=int, default=224)
    parser.add_argument("--images", type=int, default=640)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=1, help="epochs after the warm-up")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rates: dict[str, list[float]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as folder:
        write_shards(Path(folder), args.images)
        indexing = [sys.executable, "-m", "bigscl.tools.cli", "index", f"{folder}/train-*.tar"]
        subprocess.run(indexing, cwd=ROOT, check=True, capture_output=True)
        for number in range(args.rounds):
            for place, kind in enumerate(KINDS):
                started = time.monotonic()
                rates[kind].append(run(kind, Path(folder), number * len(KINDS) + place, args))
                print(
                    f"{kind}: {rates[kind][-1]:.1f} images/s ({time.monotonic() - started:.0f} s)", flush=True
                )
    none, memory, disk = (float(np.median(rates[kind])) for kind in KINDS)
    ratios = {"disk / no store": disk / none, "disk / memory": disk / memory}
    print(", ".join(f"{name}: {ratio:.3f}" for name, ratio in ratios.items()))
    if args.json:
        args.json.write_text(json.dumps({"rates": rates, "ratios": ratios}, indent=1))


if __name__ == "__main__":
    main()
