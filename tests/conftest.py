"""What all tests share: one thread for each process, folders in RAM, and the fork server."""

import os
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Set before torch is imported. The work of a test is small, and as many tests run at a time as there are
# cores: more threads only spin while they wait for each other, up to ten times the CPU seconds of the work.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import psutil
import pytest

from tests import forks

if TYPE_CHECKING:
    from bigscl.store import StorageOptions

RAM = Path("/dev/shm")
RAM_BYTES = 6 * 2**30
"""Free memory, of which the folders of all tests take about a tenth."""


def put_folders_in_ram() -> None:
    """Let temporary folders be in RAM if there is enough: a run of a second waits as long for 189 syncs."""
    if RAM.is_dir() and min(shutil.disk_usage(RAM).free, psutil.virtual_memory().available) > RAM_BYTES:
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(RAM))


put_folders_in_ram()


@pytest.fixture(scope="session", autouse=True)
def free_ram(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Remove the folders at the end if no test has failed. Not sooner: threads may still write to them."""
    yield
    folder = tmp_path_factory.getbasetemp()
    if folder.is_relative_to(RAM) and not request.session.testsfailed:
        shutil.rmtree(folder, ignore_errors=True)


LONG = (
    "integration/test_resume",
    "pairs",
    "integration",
    "faults",
    "distributed",
    "clusters",
    "test_tools/test_view_browser",
    "test_tools/test_view_review",
    *(f"test_tools/test_{name}" for name in ("study", "environment", "hostile_calls", "your_images")),
    *(f"test_tools/test_{name}" for name in ("publish", "real_folders", "render", "quickstart", "run")),
    *(
        f"test_store/test_{name}"
        for name in ("state_machine", "processes", "crash", "bad_connections", "two_writers")
    ),
    *(f"test_bigscl/test_{name}" for name in ("workers", "model", "report", "tables", "interrupts")),
    *(
        f"test_bigscl/test_{name}"
        for name in ("loader", "collective_trace", "writing", "fuzz", "metrics", "hardware")
    ),
)
"""Files and folders that take long: started first when workers share the files, left out by `--quick`."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="leave out files that take long")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    return (config.getoption("quick") and _place_in_the_run(collection_path) < len(LONG)) or None


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: _place_in_the_run(item.path))


def _place_in_the_run(path: Path) -> int:
    name = path.relative_to(Path(__file__).parent).as_posix()
    return next((place for place, start in enumerate(LONG) if name.startswith(start)), len(LONG))


@pytest.fixture(scope="module")
def shards(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of indexed scenes, to be read only: as many as the module's SCENES says."""
    from tests.builders import (  # imports torch, which most tests of the store do not need
        SCENES,
        shared_shards,
    )

    return shared_shards(tmp_path_factory, *getattr(request.module, "SCENES", SCENES))


@pytest.fixture(scope="session")
def trainer_server() -> forks.ForkServer:
    """A process that has imported the trainer, the evaluation and the tools."""
    return forks.trainer_server()


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """The address of an S3 server with a bucket named `bucket`, for which this process has credentials."""
    pytest.importorskip("moto.server")
    from tests.servers import make_bucket, s3_server

    os.environ.update(forks.CREDENTIALS)
    with s3_server() as address:
        make_bucket(address, "bucket")
        yield address


@pytest.fixture(scope="session")
def s3_options(s3_endpoint: str) -> "StorageOptions":
    """What reaches the server of `s3_endpoint`."""
    from bigscl.store import StorageOptions

    return StorageOptions(endpoint=s3_endpoint, region=forks.CREDENTIALS["AWS_REGION"])


def pytest_unconfigure() -> None:
    forks.close_servers()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say in one line which tests were skipped, and why."""
    reports = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in reports)
    if reasons:
        told = "; ".join(f"{count} ({reason})" for reason, count in reasons.most_common())
        terminalreporter.write_line(f"skipped: {told}")
