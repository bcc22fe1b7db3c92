"""Small tars and images for tests, and where the real ones are."""

import functools
import http.server
import io
import json
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

DATA = Path(__file__).parent.parent.parent / "shared" / "data"
VOC = DATA / "voc2012"
WDS = DATA / "wds_real"
real_data = pytest.mark.skipif(not DATA.exists(), reason="the real data is not there")


def picture(seed: int, width: int = 40, height: int = 30) -> Image.Image:
    """A smooth picture, different for each seed."""
    small = np.random.default_rng(seed).integers(0, 256, (4, 5, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.BICUBIC)


def encoded(image: Image.Image, kind: str = "JPEG", **options) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def jpeg(seed: int, width: int = 40, height: int = 30) -> bytes:
    return encoded(picture(seed, width, height), quality=90)


def write_tar(path: Path, members: list[tuple[str, bytes]], mode: str = "w") -> Path:
    with tarfile.open(path, mode) as tar:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def labelled(key: str, seed: int, **fields) -> list[tuple[str, bytes]]:
    """The members of a sample with a json."""
    return [(f"{key}.jpg", jpeg(seed)), (f"{key}.json", json.dumps(fields).encode())]


def classed(key: str, seed: int, label: int) -> list[tuple[str, bytes]]:
    """The members of a sample with a class number."""
    return [(f"{key}.jpg", jpeg(seed)), (f"{key}.cls", str(label).encode())]


def write_shards(folder: Path, sizes: list[int], num_classes: int = 5) -> list[str]:
    """Shards train-000000.tar and so on, of single-label samples with unique keys."""
    first = np.cumsum([0, *sizes])
    paths = []
    for shard, size in enumerate(sizes):
        rows = [first[shard] + n for n in range(size)]
        members = [member for n in rows for member in classed(f"k{n:04d}", int(n), int(n) % num_classes)]
        paths.append(str(write_tar(folder / f"train-{shard:06d}.tar", members)))
    return paths


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder without a line for each request."""

    def log_message(self, *args) -> None:
        pass


@contextmanager
def web_server(folder: Path, handler: type[QuietHandler] = QuietHandler) -> Iterator[str]:
    """The address of a web server on this machine over a folder."""
    handle = functools.partial(handler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handle) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
