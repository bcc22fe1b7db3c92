"""The page of `bigscl view` over a run of ImageNet's size: seconds of its pages, and memory of its server.

    python -m tests.benchmarks.view [--images 1281167] [--classes 1000] [--folder FOLDER]

The run is made for it: real shards of 1,000 images of 400 x 300 pixels and real versions of a store (scores,
the 10 strongest heatmaps, visits), eight of each. All others are links to these: it takes 500 MB, and what
is read is in the page cache. The server is a process of its own, as users start it. Requests are
those of the page: the list with its heat, then its 24 images, four at a time.

To see what a training loses, give it --beside SECONDS: a process per core that computes without pause is
timed for as long, without the page and while somebody goes to the next page every three seconds, in turn.
"""

import argparse
import http.client
import io
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
from PIL import Image

from bigscl.data.build_index import scan
from bigscl.data.index import Index, load_index, with_fingerprint
from bigscl.store import GroupSpec, HeatmapStore, Ragged, Rows, Snapshot

REAL = 8
PER_SHARD = 1000
SIDE, TOP = 14, 10
COUNT = 24
QUERIES = {
    "surprise": "sort=surprise",
    "scores against heatmaps": "sort=heat",
    "change": "sort=change",
    "a class, not annotated": "sort=score&class=7&annotated=no",
    "expected, score from 0.3": "sort=surprise&expected=yes&low=0.3",
    "part of a key": "sort=surprise&key=00012",
}


# The run


def make_run(folder: Path, num_images: int, num_classes: int) -> Path:
    num_shards = -(-num_images // PER_SHARD)
    index = make_index(folder / "shards", num_shards, num_images, num_classes)
    run = folder / "run"
    run.mkdir()
    (run / "config.yaml").write_text(f"data:\n  train: {folder / 'shards'}/train-*.tar\n")
    make_store(run / "store", index)
    return run


def make_index(folder: Path, num_shards: int, num_images: int, num_classes: int) -> Index:
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    pictures = [_jpeg(random) for _ in range(50)]
    for number in range(min(REAL, num_shards)):
        with tarfile.open(folder / f"train-{number:06d}.tar", "w") as tar:
            for place in range(PER_SHARD):
                label = str(random.integers(num_classes)).encode()
                for extension, content in (("jpg", pictures[place % 50]), ("cls", label)):
                    info = tarfile.TarInfo(f"{number:03d}{place:06d}.{extension}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    names = [f"class {number}" for number in range(num_classes)]
    real, _ = scan(sorted(map(str, folder.glob("*.tar"))), class_names=names)
    for number in range(REAL, num_shards):
        os.link(folder / f"train-{number % REAL:06d}.tar", folder / f"train-{number:06d}.tar")
    urls = tuple(sorted(map(str, folder.glob("*.tar"))))
    rows = np.concatenate([np.arange(PER_SHARD) + PER_SHARD * (n % REAL) for n in range(num_shards)])
    sizes = np.full(num_shards, PER_SHARD)
    sizes[-1] = num_images - PER_SHARD * (num_shards - 1)
    past = np.arange(len(rows)) >= num_images
    index = with_fingerprint(
        replace(
            real,
            urls=urls,
            shard_sizes=sizes,
            shard_bytes=real.shard_bytes[np.arange(num_shards) % REAL],
            keys=_taken(real.keys, rows, past),
            given=_taken(real.given, rows, past),
            negatives=_taken(real.negatives, rows, past),
            image_offsets=np.where(past, 0, real.image_offsets[rows]),
            image_bytes=np.where(past, 0, real.image_bytes[rows]),
        )
    )
    index.save(folder / "bigscl-index-train.npz")
    return load_index(f"{folder}/train-*.tar")


def _jpeg(random: np.random.Generator) -> bytes:
    coarse = random.integers(0, 255, (15, 20, 3), np.uint8)
    image = Image.fromarray(coarse).resize((400, 300), Image.Resampling.BICUBIC)
    out = io.BytesIO()
    noisy = np.asarray(image) + random.normal(0, 12, (300, 400, 3))
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(out, "JPEG", quality=85)
    return out.getvalue()


def _taken(rows: Ragged, places: np.ndarray, empty: np.ndarray) -> Ragged:
    kept = places[~empty]
    _, values = rows.entries(kept)
    lengths = np.where(empty, 0, rows.lengths[places])
    return Ragged.from_lengths(lengths, values)


def make_store(place: Path, index: Index) -> None:
    """Two snapshots, whose shards are links to those of a few."""
    annotations = index.annotations()
    HeatmapStore.create(place, annotations, heatmap_size=SIDE, group=GroupSpec(top=TOP, layout="topk"))
    random = np.random.default_rng(1)
    with HeatmapStore.open(place, annotations=annotations, mode="w", run="benchmark") as store:
        for epoch in (0, 1):
            for shard in range(min(REAL, store.spec.num_shards)):
                store.save_shard(shard, _learnt(store, shard, epoch, random))
            # Of 1,000 classes one in five images has one more than its label.
            cuts = {
                "score": [0.7988] * index.num_classes,
                "tie_id": [store.spec.num_rows] * index.num_classes,
                "num_expected": [store.spec.num_samples // index.num_classes] * index.num_classes,
            }
            attributes = {"selection": cuts, "next_epoch": epoch + 1, "skipped": [], "momentum": 0.8}
            store.commit(epoch=epoch, step=epoch, attributes=attributes)
        ids = [one.id for one in store.snapshots()][-2:]
    for number in ids:
        _link_others(place, number)


def _learnt(store: HeatmapStore, shard: int, epoch: int, random: np.random.Generator) -> Rows:
    rows = store.load_shard(shard)
    rows.scores[:] = 0.8 * random.random(rows.scores.shape, np.float32) ** 8
    rows.heatmaps[:] = random.random(rows.heatmaps.shape, np.float32) ** 2
    rows["last_epoch"][:], rows["sample_visits"][:], rows["cell_visits"][:] = epoch, epoch + 1, epoch + 1
    return rows


def _link_others(place: Path, number: int) -> None:
    file = place / "snapshots" / f"{number:08d}.json"
    snapshot = Snapshot.from_bytes(file.read_bytes())
    slots = list(snapshot.slots)
    digests = {name: np.frombuffer(table, "<i8").copy() for name, table in snapshot.digests.items()}
    for shard in range(REAL, len(slots)):
        for chunk in place.glob(f"{snapshot.group}/*/c.{slots[shard % REAL]}.{shard % REAL}.*"):
            parts = chunk.name.split(".")
            target = chunk.with_name(".".join([*parts[:2], str(shard), *parts[3:]]))
            if not target.exists():
                os.link(chunk, target)
        slots[shard] = slots[shard % REAL]
        for values in digests.values():
            values[shard] = values[shard % REAL]
    tables = {name: values.tobytes() for name, values in digests.items()}
    file.write_bytes(replace(snapshot, slots=tuple(slots), digests=tables).to_bytes())


# The page


class Page:
    """The server as users start it, and a browser's requests."""

    def __init__(self, run: Path) -> None:
        command = [sys.executable, "-m", "bigscl", "view", str(run), "--port", "0"]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        self.port = int(re.search(r":(\d+)/", self.process.stdout.readline())[1])
        self.cost = psutil.Process(self.process.pid)

    def get(self, path: str) -> bytes:
        connection = http.client.HTTPConnection("127.0.0.1", self.port)
        connection.request("GET", path)
        answer = connection.getresponse()
        body = answer.read()
        connection.close()
        if answer.status != 200:
            self.close()
            raise SystemExit(f"{path}: {answer.status} {body[:300]!r}")
        return body

    def show(self, query: str, offset: int) -> tuple[float, float, int]:
        """Return seconds until the listing is there, until all images are, and how many samples match."""
        start = time.monotonic()
        found = json.loads(self.get(f"/api/samples?{query}&offset={offset}&count={COUNT}"))
        listed = time.monotonic() - start
        with ThreadPoolExecutor(4) as pool:
            rows = [one["row"] for one in found["items"]]
            list(pool.map(lambda row: self.get(f"/api/thumbnail?row={row}&side=256"), rows))
        return listed, time.monotonic() - start, found["total"]

    def close(self) -> None:
        self.process.terminate()
        self.process.communicate()


def measure(run: Path) -> None:
    page = Page(run)
    start, peak = time.monotonic(), 0
    while json.loads(page.get("/api/state"))["indexed"] is None:
        peak = max(peak, page.cost.memory_info().rss)
        time.sleep(0.5)
    cpu = sum(page.cost.cpu_times()[:2])
    size = sum(file.stat().st_size for file in (run / "view").rglob("*") if file.is_file())
    seconds = time.monotonic() - start
    print(f"index: {seconds:.0f} s, {cpu:.0f} CPU s, {size / 1e6:.0f} MB; RSS {peak / 1e6:.0f} MB")
    page.close()
    opening = time.monotonic()
    page = Page(run)
    print(f"start of the server with its index: {time.monotonic() - opening:.1f} s")
    print(
        "| list | samples | first page: list | with images | next page: list | with images |\n"
        "|---|---:|---:|---:|---:|---:|"
    )
    before, pages = sum(page.cost.cpu_times()[:2]), 9 * len(QUERIES)
    for name, query in QUERIES.items():
        first = page.show(query, 0)
        more = [page.show(query, COUNT * number) for number in range(1, 9)]
        middle = [statistics.median(values) for values in zip(*more, strict=True)]
        print(
            f"| {name} | {first[2]:,} | {first[0]:.2f} | {first[1]:.2f} | {middle[0]:.2f} | {middle[1]:.2f} |"
        )
    spent = (sum(page.cost.cpu_times()[:2]) - before) / pages
    print(f"a page costs {spent:.2f} CPU s")
    for name, path in {
        "a sample": "sample?row=12345",
        "classes": "classes",
        "questions": "questions?count=6",
    }.items():
        seconds = []
        for _ in range(3):
            start = time.monotonic()
            page.get(f"/api/{path}")
            seconds.append(time.monotonic() - start)
        print(f"{name}: {seconds[0]:.2f} s, then {min(seconds[1:]):.2f} s")
    print(f"server: RSS {page.cost.memory_info().rss / 1e6:.0f} MB")
    page.close()


# Beside a training


def _compute(seconds: float, results: "multiprocessing.Queue[float]") -> None:
    """Return how many products a process gets done in this time."""
    matrix, done, end = np.random.default_rng(0).random((300, 300)), 0, time.monotonic() + seconds
    while time.monotonic() < end:
        matrix @ matrix
        done += 1
    results.put(done / seconds)


def beside(run: Path, seconds: float) -> None:
    """Time a process per core, without and with somebody who looks at the page, in turn."""
    page, speeds = Page(run), {"alone": [], "beside the page": []}
    for turn in range(8):
        name = ["alone", "beside the page"][turn % 2]
        results: multiprocessing.Queue[float] = multiprocessing.Queue()
        workers = [
            multiprocessing.Process(target=_compute, args=(seconds / 8, results))
            for _ in range(os.cpu_count() or 1)
        ]
        for one in workers:
            one.start()
        end, offset = time.monotonic() + seconds / 8, turn * 1000
        while name != "alone" and time.monotonic() < end - 1:
            page.show("sort=surprise", offset)
            offset += COUNT
            time.sleep(3)
        speeds[name].append(sum(results.get() for _ in workers))
        for one in workers:
            one.join()
    page.close()
    alone, with_page = (statistics.mean(values) for values in speeds.values())
    apart = 100 * (with_page / alone - 1)
    print(f"products per second: alone {alone:.1f}, beside the page {with_page:.1f} ({apart:+.1f}%)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=1_281_167)
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument(
        "--folder", type=Path, help="where the run is made, and kept; default: a temporary folder"
    )
    parser.add_argument("--beside", type=float, metavar="SECONDS", default=0)
    words = parser.parse_args()
    folder = words.folder or Path(tempfile.mkdtemp())
    try:
        if not (folder / "run").exists():
            start = time.monotonic()
            make_run(folder, words.images, words.classes)
            print(f"made in {time.monotonic() - start:.0f} s")
        measure(folder / "run")
        if words.beside:
            beside(folder / "run", words.beside)
    finally:
        if words.folder is None:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main()
