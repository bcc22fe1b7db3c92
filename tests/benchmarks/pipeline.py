"""Training input from JPEGs, side by side with the pipelines that people would pick instead.

    pip install --no-deps --target peers -r tests/benchmarks/peers.txt
    PYTHONPATH=peers python -m tests.benchmarks.pipeline [--photos FOLDER] [--workers 0] [--rounds 5]
    python -m tests.benchmarks.pipeline --memory
    python -m tests.benchmarks.pipeline --receiving --workers 2

Every way reads the same files, crops at random as RandomResizedCrop does, mirrors half, and gives uint8
batches of 64 x 3 x 224 x 224 with labels. Rounds alternate, and the CPU time of the whole process tree is
counted, so that other work on the machine hardly matters. A peer that is not installed is left out with a
word; all peers keep full JPEGs. FFCV is measured if it can be imported; it builds only beside OpenCV and
libturbojpeg.

`--photos` takes JPEGs as they are, for example ImageNet's; without it, a few photographs are cut and encoded
to ImageNet's usual size. `--memory` prints the private memory of each loader process, for a small set and one
of four times its size. `--receiving` prints how long the thread that takes a batch and frees an older one
computes, with Python's lock held.
"""

import argparse
import io
import os
import resource
import statistics
import tarfile
import tempfile
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import psutil
import torch
import webdataset
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode
from torchvision.transforms import v2

from bigscl.data.build_index import scan
from bigscl.data.decode import jpeg_decoder
from bigscl.data.epoch_plan import training_plan
from bigscl.data.index import Index
from bigscl.data.loader import Loader
from bigscl.data.transforms import DecoderName, TrainingTransform
from tests.builders import WDS, encoded
from tests.decoders import has_nvimgcodec

SIZE, BATCH, SHARD = 224, 64, 100
# Batches that a run has at a time: read ahead for their rows, in the step, and on their way.
HELD = 6
Way = Callable[[], Iterable[Tensor]]


# The files


def photographs() -> list[Image.Image]:
    """Real photographs: scikit-learn's two, and where they are there, 32 from the web."""
    from sklearn.datasets import load_sample_images

    found = [Image.fromarray(image) for image in load_sample_images().images]
    if WDS.exists():
        with tarfile.open(WDS / "cc12m-train-0000.tar") as tar:
            files = [tar.extractfile(info) for info in tar if info.name.endswith(".jpg")]
            found += [Image.open(file).convert("RGB") for file in files if file]
    return found


def contents(photos: Path | None, count: int) -> Iterator[bytes]:
    """The JPEGs to load: those of a folder as they are, or 500 x 375 or upright, 100 KB as in ImageNet."""
    random = np.random.default_rng(0)
    if photos is not None:
        files = [path for path in sorted(photos.rglob("*")) if path.suffix.lower() in (".jpg", ".jpeg")]
        for n in random.permutation(max(count, len(files)))[:count]:
            yield files[n % len(files)].read_bytes()
        return
    sources = photographs()
    for n in range(count):
        yield _photograph(sources[n % len(sources)], random)


def _photograph(source: Image.Image, random: np.random.Generator) -> bytes:
    width, height = (500, 375) if random.random() < 0.75 else (375, 500)
    share = 0.8 + 0.2 * random.random()
    box_width = int(min(source.width, source.height * width / height) * share)
    box_height = int(box_width * height / width)
    left = int(random.random() * (source.width - box_width))
    top = int(random.random() * (source.height - box_height))
    box = (left, top, left + box_width, top + box_height)
    return encoded(source.resize((width, height), Image.Resampling.LANCZOS, box=box), quality=98)


class Files:
    """The same JPEGs in the form that each way wants."""

    def __init__(self, folder: Path, photos: Path | None, count: int) -> None:
        self.root, self.folder, self.shards, self.count = folder, folder / "folder", [], count
        for n, content in enumerate(contents(photos, count)):
            path = self.folder / str(n % 10) / f"{n:06d}.jpg"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        for first in range(0, count, SHARD):
            self.shards.append(str(folder / f"train-{first // SHARD:06d}.tar"))
            with webdataset.TarWriter(self.shards[-1]) as writer:
                for n, content in islice(self.encoded(), first, first + SHARD):
                    writer.write({"__key__": f"{n:06d}", "jpg": content, "cls": n % 10})
        self.index: Index = scan(self.shards)[0]

    def encoded(self) -> Iterator[tuple[int, bytes]]:
        for n in range(self.count):
            yield n, (self.folder / str(n % 10) / f"{n:06d}.jpg").read_bytes()


# The ways


def with_bigscl(
    files: Files, workers: int, decoder: DecoderName, shuffle_buffer: int = 1000
) -> Iterable[Tensor]:
    index = files.index
    plan = training_plan(
        index.shard_sizes,
        index.rows_per_shard,
        seed=1,
        epoch=1,
        batch_size=BATCH,
        workers=workers,
        shuffle_buffer=shuffle_buffer,
    )
    for batch in Loader(index, plan, 0, TrainingTransform(size=SIZE, seed=1, epoch=1), decoder=decoder):
        yield batch.images


def with_webdataset(files: Files, workers: int, decode: Callable[[bytes], Tensor]) -> Iterable[Tensor]:
    shards = files.shards
    dataset = webdataset.WebDataset(shards, shardshuffle=len(shards), nodesplitter=None).shuffle(1000)
    dataset = dataset.to_tuple("jpg", "cls").map_tuple(decode, int).batched(BATCH)
    for images, _ in DataLoader(dataset, batch_size=None, num_workers=workers):
        yield images


def by_pillow(content: bytes) -> Tensor:
    return PILLOW(Image.open(io.BytesIO(content)).convert("RGB"))


def by_torchvision(content: bytes) -> Tensor:
    decode_jpeg = jpeg_decoder()
    assert decode_jpeg is not None
    # The operator below decode_jpeg, which warns at each call; of CMYK, as ImageNet has it, RGB.
    return TENSORS(
        decode_jpeg(torch.frombuffer(bytearray(content), dtype=torch.uint8), ImageReadMode.RGB.value, False)
    )


PILLOW = v2.Compose([v2.RandomResizedCrop(SIZE), v2.RandomHorizontalFlip(), v2.PILToTensor()])
TENSORS = v2.Compose([v2.RandomResizedCrop(SIZE, antialias=True), v2.RandomHorizontalFlip()])


def with_image_folder(files: Files, workers: int) -> Iterable[Tensor]:
    dataset = ImageFolder(str(files.folder), PILLOW)
    for images, _ in DataLoader(dataset, batch_size=BATCH, shuffle=True, num_workers=workers):
        yield images


def with_streaming(files: Files, workers: int) -> Way:
    """mosaicml-streaming: shards of its own format with the JPEGs as they are."""
    from streaming import MDSWriter, StreamingDataset

    class Photos(StreamingDataset):
        def __getitem__(self, at):
            sample = super().__getitem__(at)
            return by_torchvision(sample["image"]), sample["label"]

    local = str(files.root / "streaming")
    with MDSWriter(out=local, columns={"image": "bytes", "label": "int"}) as writer:
        for n, content in files.encoded():
            writer.write({"image": content, "label": n % 10})
    dataset = Photos(local=local, shuffle=True, batch_size=BATCH)

    def run() -> Iterable[Tensor]:
        for images, _ in DataLoader(dataset, batch_size=BATCH, num_workers=workers):
            yield images

    return run


def with_dali(files: Files, workers: int) -> Way:
    """NVIDIA DALI on the CPU: its fused decoder of random crops, and its antialiased resize."""
    from nvidia.dali import fn, pipeline_def, types

    @pipeline_def(batch_size=BATCH, num_threads=max(1, workers), device_id=None, seed=1)
    def pipeline():
        image, label = fn.readers.webdataset(
            paths=files.shards, ext=["jpg", "cls"], missing_component_behavior="error", random_shuffle=True
        )
        image = fn.decoders.image_random_crop(
            image,
            device="cpu",
            output_type=types.RGB,
            random_area=[0.08, 1.0],
            random_aspect_ratio=[3 / 4, 4 / 3],
        )
        image = fn.resize(image, size=[SIZE, SIZE], interp_type=types.INTERP_LINEAR, antialias=True)
        return fn.flip(image, horizontal=fn.random.coin_flip()), label

    built = pipeline()
    built.build()

    def run() -> Iterable[Tensor]:
        for _ in range(files.count // BATCH):
            images, _ = built.run()
            yield torch.from_numpy(images.as_array()).permute(0, 3, 1, 2)

    return run


def with_ffcv(files: Files, workers: int) -> Way:
    """FFCV: a file of its own format with the JPEGs as they are; its resize is OpenCV's, not antialiased."""
    from ffcv.fields import IntField, RGBImageField
    from ffcv.fields.decoders import IntDecoder, RandomResizedCropRGBImageDecoder
    from ffcv.loader import Loader as FfcvLoader
    from ffcv.loader import OrderOption
    from ffcv.transforms import RandomHorizontalFlip, ToTensor, ToTorchImage
    from ffcv.writer import DatasetWriter

    beton = str(files.root / "photos.beton")
    fields = {"image": RGBImageField(write_mode="jpg", jpeg_quality=98), "label": IntField()}
    DatasetWriter(beton, fields).from_indexed_dataset(ImageFolder(str(files.folder)))
    image = [
        RandomResizedCropRGBImageDecoder((SIZE, SIZE)),
        RandomHorizontalFlip(),
        ToTensor(),
        ToTorchImage(),
    ]
    pipelines = {"image": image, "label": [IntDecoder(), ToTensor()]}

    def run() -> Iterable[Tensor]:
        loader = FfcvLoader(
            beton,
            batch_size=BATCH,
            num_workers=max(1, workers),
            order=OrderOption.QUASI_RANDOM,
            pipelines=pipelines,
        )
        for images, _ in loader:
            yield images

    return run


def ways_of(files: Files, workers: int) -> tuple[dict[str, Way], dict[str, Way]]:
    """Ours and the peers, by name; says which ones are not installed."""
    ours: dict[str, Way] = {"bigscl": lambda: with_bigscl(files, workers, "torchvision")}
    if has_nvimgcodec():
        ours["bigscl, nvimgcodec"] = lambda: with_bigscl(files, workers, "nvimgcodec")
    else:
        print("bigscl, nvimgcodec: left out, it is not installed")
    peers: dict[str, Way] = {
        "webdataset + Pillow": lambda: with_webdataset(files, workers, by_pillow),
        "webdataset + torchvision, v2": lambda: with_webdataset(files, workers, by_torchvision),
        "ImageFolder": lambda: with_image_folder(files, workers),
    }
    for name, module, make in (
        ("mosaicml-streaming + torchvision", "streaming", with_streaming),
        ("NVIDIA DALI on the CPU", "nvidia.dali", with_dali),
        ("FFCV", "ffcv", with_ffcv),
    ):
        try:
            found = find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if found:
            peers[name] = make(files, workers)
        else:
            print(f"{name}: left out, it is not installed")
    return ours, peers


# The measurements


def measure(run: Way, expected: int) -> tuple[float, float]:
    """(images per CPU second, images per second) of one epoch."""
    before, started, count = _cpu_seconds(), time.perf_counter(), 0
    for images in run():
        assert images.dtype == torch.uint8
        assert images.shape[1:] == (3, SIZE, SIZE)
        count += len(images)
    seconds = time.perf_counter() - started
    assert count == expected, f"{count} images, expected {expected}"
    return count / (_cpu_seconds() - before), count / seconds


def _cpu_seconds() -> float:
    usages = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def report(found: dict[str, list[tuple[float, float]]], peers: list[str]) -> None:
    """Medians over the rounds, and the ratio to the best peer in each round."""
    print(f"{'':36}images/CPU second   images/s")
    for name, rounds in found.items():
        cpu, wall = (statistics.median(values) for values in zip(*rounds, strict=True))
        print(f"{name:36}{cpu:17.0f}{wall:11.0f}")
    best = [max(pairs) for pairs in zip(*([cpu for cpu, _ in found[name]] for name in peers), strict=True)]
    for name in found.keys() - set(peers):
        ratios = [cpu / other for (cpu, _), other in zip(found[name], best, strict=True)]
        median, low, high = statistics.median(ratios), min(ratios), max(ratios)
        print(f"{name}: {median:.2f} times the best peer (rounds {low:.2f} to {high:.2f})")


def compare(options: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder), options.photos, options.images // BATCH * BATCH)
        kilobytes = files.index.image_bytes.sum() / files.count / 1000
        print(f"{files.count} JPEGs of {kilobytes:.0f} KB, {options.workers} workers")
        ours, peers = ways_of(files, options.workers)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in {**ours, **peers}}
        for number in range(options.rounds + 1):
            for name, run in {**ours, **peers}.items():
                speed = measure(run, files.count)
                # The first round loads modules and files.
                if number:
                    found[name].append(speed)
        report(found, list(peers))


def memory(options: argparse.Namespace) -> None:
    """Print the most private memory that a loader process had, of a set and of one four times its size."""
    for decoder in ("torchvision", "nvimgcodec") if has_nvimgcodec() else ("torchvision",):
        for count in (options.images, 4 * options.images):
            with tempfile.TemporaryDirectory() as folder:
                files = Files(Path(folder), options.photos, count)
                most = 0
                # Undecoded samples wait in a buffer of a set length, which small sets would not fill.
                for _ in with_bigscl(files, max(2, options.workers), decoder, shuffle_buffer=50):
                    children = psutil.Process().children()
                    most = max([most, *(child.memory_full_info().uss for child in children)])
            print(f"{decoder}: {count} images, at most {most / 1e6:.0f} MB of its own in each loader process")


def receiving(options: argparse.Namespace) -> None:
    """Print the CPU milliseconds of taking a batch and of freeing the one taken HELD batches before."""
    with tempfile.TemporaryDirectory() as folder:
        files = Files(Path(folder), options.photos, options.images // BATCH * BATCH)
        batches, held, found = iter(with_bigscl(files, max(1, options.workers), "torchvision")), deque(), []
        while True:
            before = time.thread_time()
            if len(held) == HELD:
                held.popleft()
            if (images := next(batches, None)) is None:
                break
            held.append(images)
            found.append(1000 * (time.thread_time() - before))
    # The first ones start the workers and free nothing.
    mean, median = (compute(found[HELD:]) for compute in (statistics.mean, statistics.median))
    print(f"taking and freeing a batch of {BATCH}: mean {mean:.2f} ms, median {median:.2f} ms of CPU time")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--photos", type=Path)
    parser.add_argument("--images", type=int, default=448)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    parser.add_argument("--receiving", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    (memory if options.memory else receiving if options.receiving else compare)(options)


if __name__ == "__main__":
    main()
