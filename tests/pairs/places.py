"""Where the tars and stores of the rows are: folders, a web server, an S3 server and an Azure server."""

import csv
import shutil
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from bigscl.data.answers import Answer, now
from bigscl.data.index import load_index
from tests.builders import make_shards
from tests.forks import CREDENTIALS, free_port
from tests.servers import make_bucket, serving, web_server

NUM_SHARDS = 8
BUCKET = "pairs"
AZURITE = "azurite-blob"
# The account that every Azurite has; Microsoft documents it.
AZURE = {
    "AZURE_STORAGE_ACCOUNT_NAME": "devstoreaccount1",
    "AZURE_STORAGE_ACCOUNT_KEY": "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq"
    "/K1SZFPTOtr/KBHBeksoGMGw==",
}


@dataclass(frozen=True, slots=True)
class Places:
    """The shards, and the addresses of their copies."""

    shards: Path
    tars: dict[str, str]
    """Where the tars are, by the name of the dimension's value; see `pattern`."""
    environment: dict[str, str]
    """Addresses and credentials of the servers."""

    def pattern(self, kind: str, part: str) -> str:
        """Return where the tars of a part (train or val) are."""
        last = len(list(self.shards.glob(f"{part}-*.tar"))) - 1
        return self.tars[kind].replace("PART", part).replace("LAST", f"{last:06d}")

    @property
    def missing(self) -> str:
        """Why rows with `az` cannot be tried; empty if they can."""
        return (
            ""
            if "AZURE_STORAGE_ENDPOINT" in self.environment
            else f"{AZURITE} is not installed: npm install -g azurite"
        )


def fill(folder: Path) -> None:
    """Write shards, their indexes, and files with other labels into a folder."""
    # The last shard is smaller; three processes have two steps an epoch even if they accumulate batches.
    make_shards(folder, train=6 * NUM_SHARDS + 2, samples_per_shard=6, val=12)
    for part, labels in (("train", "given"), ("val", "full")):
        index = load_index(str(folder / f"{part}-*.tar"))
        known = index.labels_of(index.ids(), labels)
        with (folder / f"{part}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["key", "positives"])
            for sample, row in zip(index.ids(), known, strict=True):
                # Other labels than those of the shards.
                names = ";".join(index.class_names[(c + 1) % 10] for c in np.flatnonzero(row == 1))
                rows.writerow([index.key(int(sample)), names])


def some_answers(shards: Path) -> list[Answer]:
    """Answers about pairs that no label names, one label that is refuted, and one that is confirmed."""
    index = load_index(str(shards / "train-*.tar"))
    ids = index.ids()
    given, full = index.labels_of(ids), index.labels_of(ids, "full")
    unnamed = np.random.default_rng(0).permutation(np.argwhere(given != 1))[:10].tolist()
    named = np.argwhere(given == 1)[[0, -1]].tolist()
    given = [(n, c, bool(full[n, c] == 1)) for n, c in unnamed]
    given[1:1] = [(*named[0], False), (*named[1], True)]
    return [Answer(index.key(int(ids[n])), index.class_names[c], yes, "ann", now()) for n, c, yes in given]


@contextmanager
def serve(shards: Path, scratch: Path) -> Iterator[Places]:
    """Copies of the shards behind every kind of server."""
    with ExitStack() as stack:
        web = stack.enter_context(web_server(shards))
        tars = {"folder": f"{shards}/PART-*.tar", "http": f"{web}/PART-{{000000..LAST}}.tar"}
        environment = {**CREDENTIALS, "AWS_ENDPOINT_URL": stack.enter_context(_s3(shards))}
        tars |= {kind: f"{kind}://{BUCKET}/shards/PART-*.tar" for kind in ("s3", "az")}
        if shutil.which(AZURITE):
            environment |= AZURE | {"AZURE_STORAGE_ENDPOINT": stack.enter_context(_azurite(shards, scratch))}
        yield Places(shards, tars, environment)


@contextmanager
def _s3(shards: Path) -> Iterator[str]:
    """The address of an S3 server in a process of its own, with a bucket that has the shards."""
    port = free_port()
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    with serving(words, port):
        make_bucket(f"http://127.0.0.1:{port}", BUCKET, shards.glob("*.tar"), "shards/")
        yield f"http://127.0.0.1:{port}"


@contextmanager
def _azurite(shards: Path, scratch: Path) -> Iterator[str]:
    """The address of an Azure server, with a container that has the shards."""
    from azure.storage.blob import BlobServiceClient

    port = free_port()
    place = ["--blobHost", "127.0.0.1", "--blobPort", str(port), "--location", str(scratch / "azurite")]
    with serving([AZURITE, "--silent", "--skipApiVersionCheck", *place], port):
        address = f"http://127.0.0.1:{port}/{AZURE['AZURE_STORAGE_ACCOUNT_NAME']}"
        account = BlobServiceClient(address, credential=AZURE["AZURE_STORAGE_ACCOUNT_KEY"])
        container = account.create_container(BUCKET)
        for tar in shards.glob("*.tar"):
            container.upload_blob(f"shards/{tar.name}", tar.read_bytes())
        yield address
