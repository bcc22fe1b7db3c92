"""Shards behind signed URLs: a run and all that is made of it, and no file or message with a signature."""

import base64
import functools
import gzip
import http.server
import io
import json
import os
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pyarrow.parquet as pq
import pytest
from numcodecs import Zstd
from PIL import Image

from bigscl.common.url_secrets import VARIABLE
from tests.builders import make_shards, write_config
from tests.forks import trainer_server

FIRST, RENEWED = "first-signature-Zx81%2Fq", "renewed-signature-Kw52%2Fp"
PASSWORD = "password-of-this-test"
SECRETS = [each.partition("%")[0].encode() for each in (FIRST, RENEWED, PASSWORD)]
"""Up to their escapes, which some texts lack."""
ZSTD, GZIP, PARQUET, ZIP = b"\x28\xb5\x2f\xfd", b"\x1f\x8b", b"PAR1", b"PK\x03\x04"


class _Handler(http.server.SimpleHTTPRequestHandler):
    """Files for those whose signature, or password, is the valid one."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    valid: dict[str, str]

    def do_GET(self) -> None:
        query = parse_qs(urlsplit(self.path).query)
        name = urlsplit(self.path).path
        wanted = parse_qs(f"sig={self.valid['sig']}")["sig"]
        login = "Basic " + base64.b64encode(f"reader:{PASSWORD}".encode()).decode()
        allowed = self.headers.get("Authorization") == login if "val-" in name else query.get("sig") == wanted
        if not allowed:
            body = f"<Error>signature in {self.path} is not valid</Error>".encode()
            self.send_response(403)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        super().do_GET()

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def signed(folder: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield (host and port, the valid signature, which may be replaced) of a server over a folder."""
    valid = {"sig": FIRST}
    handler = type("Handler", (_Handler,), {"valid": valid})
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=str(folder))
    ) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        yield f"127.0.0.1:{server.server_address[1]}", valid
        server.shutdown()


def contents(name: str, data: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield (name, bytes) of a file, and of all that is compressed in it."""
    yield name, data
    if data.startswith(GZIP):
        yield from contents(f"{name}, unzipped", gzip.decompress(data))
    elif data.startswith(ZSTD):
        yield f"{name}, decompressed", bytes(Zstd().decode(data))
    elif data.startswith(ZIP):
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            for member in archive.namelist():
                yield from contents(f"{name}: {member}", archive.read(member))
    elif data.startswith(PARQUET):
        table = pq.read_table(io.BytesIO(data))
        yield f"{name}, its columns", repr([table.schema.metadata, table.to_pydict()]).encode()
    elif name.endswith(".png"):
        yield f"{name}, its texts", repr(Image.open(io.BytesIO(data)).info).encode()


def leaks(folder: Path) -> list[str]:
    """Return what has a secret, of all files in a folder and what is in them."""
    found = []
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        for name, data in contents(str(path.relative_to(folder)), path.read_bytes()):
            found += [f"{name}: {secret.decode()}" for secret in SECRETS if secret in data]
    return found


def test_secrets_are_found_in_whatever_is_compressed(tmp_path):
    import numpy as np
    import pyarrow as pa

    text = f"https://host/a.tar?sig={FIRST}"
    np.savez_compressed(tmp_path / "a.npz", urls=np.frombuffer(text.encode(), np.uint8))
    pq.write_table(pa.table({"url": [text] * 9}), tmp_path / "b.parquet", compression="zstd")
    (tmp_path / "c.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "d").write_bytes(Zstd().encode(text.encode()))
    (tmp_path / "e.txt").write_text("https://host/a.tar")
    assert {leak.partition(":")[0].partition(",")[0] for leak in leaks(tmp_path)} == {
        "a.npz",
        "b.parquet",
        "c.gz",
        "d",
    }


@pytest.mark.timeout(120)
def test_nothing_that_is_made_of_signed_shards_has_their_signature(tmp_path):
    shards, made = tmp_path / "shards", tmp_path / "made"
    make_shards(shards, 16, 8, val=8)
    run, indexes = made / "run", {part: shards / f"bigscl-index-{part}.npz" for part in ("train", "val")}
    said: list[str] = []

    def call(*words: object, code: int = 0, **variables: str) -> str:
        done = trainer_server().run_module("bigscl", *words, environment=variables)
        said.append(done.stdout + done.stderr)
        assert done.returncode == code, said[-1]
        return said[-1]

    with signed(shards) as (host, valid):
        train = f"http://{host}/train-{{000000..000001}}.tar?se=2031&sig="
        val = f"http://reader:{PASSWORD}@{host}/val-000000.tar"
        given = {VARIABLE: f"{train}{RENEWED}\n{val}"}
        for part, index in indexes.items():
            index.unlink()
            pattern = f"{train}{FIRST}" if part == "train" else val
            call("index", pattern, "--output", index, "--classes", shards / "classes.txt")
        config = write_config(
            tmp_path / "run.yaml",
            shards,
            data={"train": f"{train}{FIRST}", "train_index": str(indexes["train"]), "val": val}
            | {"val_index": str(indexes["val"])},
            schedule={
                "warmup": {"epochs": 1, "learning_rate": 1e-2},
                "main": {"epochs": 1, "learning_rate": 1e-3},
            },
            log={"trackers": ["tensorboard"]},
        )
        call("train", config, "--run", run)
        valid["sig"] = RENEWED
        refused = call("train", config, "--run", run, "--schedule.main.epochs", 2, code=2)
        assert "403" in refused
        assert VARIABLE in refused
        call("train", config, f"--data.train={train}{RENEWED}", "--run", run, "--schedule.main.epochs", 2)
        for command in commands_over(run, made, f"http://reader:{PASSWORD}@{host}/"):
            call(*command, **given)
        call("plan", config)
    assert not [text for text in said for secret in SECRETS if secret.decode() in text]
    assert not leaks(made)
    assert not leaks(shards)
    assert not [name for name in os.listdir(made) if "sig=" in name]
    shown = json.loads((made / "samples.json").read_text())["shards"]
    assert [shard["name"] for shard in shown] == ["train-000000.tar", "train-000001.tar"]


def commands_over(run: Path, made: Path, images: str) -> Iterator[tuple[object, ...]]:
    """Yield the commands that write, or print, what a run knows of its shards."""
    yield "evaluate", run, "-o", made / "evaluation"
    for form in ("csv", "jsonl", "parquet"):
        yield "export", run, "labels", "-o", made / f"labels.{form}"
    for form in ("npz", "parquet", "npy"):
        yield "export", run, "scores", "-o", made / f"scores.{form}"
    yield "export", run, "samples", "-o", made / "samples.json"
    yield "export", run, "heatmaps", "--sample", 0, "-o", made / "heatmaps.npz"
    for form in ("coco", "label-studio", "fiftyone", "dataset"):
        output = made / (f"{form}.json" if form == "coco" else form)
        prefix = ("--image-prefix", images) if form in ("coco", "label-studio") else ()
        yield "export", run, "labels", "--format", form, *prefix, "-o", output
    asked = ("--image-prefix", f"{images}{{key}}", "-o", made / "questions")
    yield "review", "export", run, "label-studio", *asked
    yield "publish", run, made / "published", "--no-onnx"
    yield "review", "list", run, "-o", made / "audit.csv"
    yield "review", "list", run, "--json"
    yield "show", run, "--json"
    yield "render", run, "-o", made / "picture.png"
    yield "view", run, "--prepare"
    yield "diff", run, run, "--json"
    yield "verify", run
