"""Training input on real photographs of ImageNet's size, side by side with the two usual ways.

    python tests/benchmarks/pipeline.py [--images 400] [--workers 0] [--rounds 5]

Every way reads the same JPEGs from disk, crops and mirrors them at random to 224 x 224, and makes batches of
64 with labels: bigscl; webdataset + Pillow + torchvision's transforms; ImageFolder + DataLoader. The rounds
alternate, and CPU time is counted (with that of workers), so that other work on the machine hardly matters.
The last line is the ratio to the better of the usual two; at least 1.25 is asked for.
"""

import argparse
import os
import resource
import statistics
import sys
import tarfile
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import numpy as np
import torch
import webdataset
from PIL import Image
from torch.utils.data import DataLoader
from torchvision import transforms as T
from torchvision.datasets import ImageFolder

from bigscl.data.batch import normalize
from bigscl.data.index import Index
from bigscl.data.loader import Loader
from bigscl.data.plan import training_plan
from bigscl.data.scan import scan
from bigscl.data.transforms import TrainingTransform
from tests.tars import WDS, encoded

SIZE, BATCH, SHARD = 224, 64, 100
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def photographs() -> list[Image.Image]:
    """Real photographs: scikit-learn's two, and where they are there, 32 from the web."""
    from sklearn.datasets import load_sample_images

    found = [Image.fromarray(image) for image in load_sample_images().images]
    if WDS.exists():
        with tarfile.open(WDS / "cc12m-train-0000.tar") as tar:
            files = [tar.extractfile(info) for info in tar if info.name.endswith(".jpg")]
            found += [Image.open(file).convert("RGB") for file in files if file]
    return found


def make_data(folder: Path, count: int) -> tuple[list[str], Path]:
    """(tar shards, image folder) of the same JPEGs, 500 x 375 or upright, about 100 KB as in ImageNet."""
    random = np.random.default_rng(0)
    sources = photographs()
    shards = []
    for first in range(0, count, SHARD):
        shards.append(str(folder / f"train-{first // SHARD:06d}.tar"))
        with webdataset.TarWriter(shards[-1]) as writer:
            for n in range(first, min(first + SHARD, count)):
                content, label = _photograph(sources[n % len(sources)], random), n % 10
                writer.write({"__key__": f"{n:06d}", "jpg": content, "cls": label})
                path = folder / "folder" / str(label) / f"{n:06d}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)
    return shards, folder / "folder"


def _photograph(source: Image.Image, random: np.random.Generator) -> bytes:
    width, height = (500, 375) if random.random() < 0.75 else (375, 500)
    share = 0.8 + 0.2 * random.random()
    box_width = int(min(source.width, source.height * width / height) * share)
    box_height = int(box_width * height / width)
    left = int(random.random() * (source.width - box_width))
    top = int(random.random() * (source.height - box_height))
    box = (left, top, left + box_width, top + box_height)
    return encoded(source.resize((width, height), Image.Resampling.LANCZOS, box=box), quality=98)


def usual_transform() -> Callable[[Image.Image], torch.Tensor]:
    """The recipe of torchvision's references."""
    return T.Compose(
        [T.RandomResizedCrop(SIZE), T.RandomHorizontalFlip(), T.ToTensor(), T.Normalize(MEAN, STD)]
    )


def with_webdataset(shards: list[str], workers: int) -> Iterable[int]:
    """Sizes of the batches of the plain webdataset pipeline."""
    transform = usual_transform()
    dataset = (
        webdataset.WebDataset(shards, shardshuffle=len(shards), nodesplitter=None).shuffle(1000).decode("pil")
    )
    dataset = dataset.to_tuple("jpg", "cls").map_tuple(transform, int).batched(BATCH)
    for images, _ in DataLoader(dataset, batch_size=None, num_workers=workers):
        yield len(images)


def with_image_folder(folder: Path, workers: int) -> Iterable[int]:
    """Sizes of the batches of torchvision's ImageFolder."""
    dataset = ImageFolder(str(folder), usual_transform())
    for images, _ in DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers):
        yield len(images)


def with_bigscl(index: Index, workers: int, on_host: bool) -> Iterable[int]:
    """Sizes of the batches of this project, whose images are normalised on the device, or here if told."""
    plan = training_plan(
        index.shard_sizes, index.rows_per_shard, seed=1, epoch=1, batch_size=BATCH, workers=workers
    )
    for batch in Loader(index, plan, 0, TrainingTransform(size=SIZE, seed=1, epoch=1)):
        yield len(normalize(batch.images, MEAN, STD) if on_host else batch)


def measure(run: Callable[[], Iterable[int]], expected: int) -> tuple[float, float]:
    """(images per CPU second, images per second) of one epoch."""
    before, started = _cpu_seconds(), time.perf_counter()
    count = sum(run())
    seconds = time.perf_counter() - started
    assert count == expected, f"{count} images, expected {expected}"
    return count / (_cpu_seconds() - before), count / seconds


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def main() -> None:
    """Measure all ways in turn, and print what they gave."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=400)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        shards, images = make_data(Path(folder), options.images)
        index, _ = scan(shards)
        print(f"{index.num_samples} JPEGs of {index.image_bytes.sum() / index.num_samples / 1000:.0f} KB")
        ways: dict[str, Callable[[], Iterable[int]]] = {
            "bigscl": lambda: with_bigscl(index, options.workers, on_host=False),
            "bigscl, normalised on the host": lambda: with_bigscl(index, options.workers, on_host=True),
            "webdataset + Pillow + torchvision": lambda: with_webdataset(shards, options.workers),
            "ImageFolder + DataLoader": lambda: with_image_folder(images, options.workers),
        }
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(options.rounds):
            for name, run in ways.items():
                found[name].append(measure(run, options.images))
    report(found)


def report(found: dict[str, list[tuple[float, float]]]) -> None:
    """Medians over the rounds, and the ratio to the better of the usual ways in each round."""
    print(f"{'':36}images/CPU second   images/s")
    for name, rounds in found.items():
        cpu, wall = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(f"{name:36}{cpu:17.0f}{wall:11.0f}")
    ours, hosted, *usual = ([cpu for cpu, _ in rounds] for rounds in found.values())
    better = [max(pair) for pair in zip(*usual, strict=True)]
    for name, mine in (("bigscl", ours), ("normalised on the host", hosted)):
        ratios = [left / right for left, right in zip(mine, better, strict=True)]
        median, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{name}: {median:.2f} times the better one (rounds {low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
