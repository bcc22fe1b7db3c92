"""A page over runs in this process, the way to ask it, and a browser that looks at it."""

import contextlib
import http.client
import json
import shutil
import threading
import time
from dataclasses import dataclass
from typing import Any

import pytest

from bigscl.tools.shared.open_store import DataFlags, StorageFlags
from bigscl.tools.viewer.api import Api
from bigscl.tools.viewer.open_run import OpenRun, Places
from bigscl.tools.viewer.server import Server

TOKEN = "the-token-of-these-tests-0123456789"


@dataclass(frozen=True)
class Got:
    """What the server answered."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Site:
    """A page that is served."""

    server: Server
    api: Api
    runs: list[OpenRun]

    @property
    def port(self) -> int:
        return self.server.server_address[1]

    def ask(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str | None) -> Got:
        """Send one request; headers are given with `_` for `-`, None leaves one out."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
            sent = {"Host": f"127.0.0.1:{self.port}"}
            sent |= {"Content-Length": str(len(body))} if body is not None else {}
            sent |= {name.replace("_", "-"): value for name, value in headers.items()}
            for name, value in sent.items():
                if value is not None:
                    connection.putheader(name, value)
            connection.endheaders(body)
            got = connection.getresponse()
            return Got(got.status, {name.lower(): value for name, value in got.getheaders()}, got.read())

    def send(self, path: str, value: Any, **headers: str | None) -> Got:
        """Send a value as the page does."""
        own: dict[str, str | None] = {
            "Content_Type": "application/json",
            "X_Bigscl_Token": TOKEN,
            "Origin": f"http://127.0.0.1:{self.port}",
        }
        return self.ask(path, "POST", json.dumps(value).encode(), **(own | headers))


@contextlib.contextmanager
def serving(*places: Any, host: str = "127.0.0.1", follow: bool = True, source: DataFlags | None = None):
    """Yield the page over these runs."""
    own = Places(source=source or DataFlags(), storage=StorageFlags(), cache=None)
    runs = [OpenRun(str(place), own) for place in places]
    for run in runs:
        if follow:
            run.update(now=True)
    api = Api(runs)
    server = Server(host, 0, TOKEN, dict.fromkeys(api.get, api.answer), dict.fromkeys(api.post, api.write))
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield Site(server, api, runs)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


# The browser

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
SECONDS = 60


@pytest.fixture(scope="module")
def browser():
    """A headless Chromium. Tests that need it are skipped without it, or without Playwright."""
    playwright = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    chromium = next((path for name in NAMES if (path := shutil.which(name))), None)
    if chromium is None:
        pytest.skip("there is no Chromium")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=chromium, args=list(FLAGS))
        yield opened
        opened.close()


@pytest.fixture
def page(browser):
    """A page on which no script may fail and nothing may be blocked by the content policy."""
    with looking(browser) as page:
        yield page


@contextlib.contextmanager
def looking(browser, **options):
    context = browser.new_context(**{"viewport": {"width": 1280, "height": 900}, **options})
    context.set_default_timeout(1000 * SECONDS)
    page = context.new_page()
    faults = []
    page.on("pageerror", lambda error: faults.append(str(error)))
    page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
    page.on("dialog", lambda dialog: (faults.append(f"dialog {dialog.message}"), dialog.dismiss()))
    yield page
    context.close()
    assert not faults


def until(page, script, given=None):
    """Wait until a script is true. Playwright's own way evaluates text, which the page forbids."""
    deadline = time.monotonic() + SECONDS
    while not page.evaluate(script, given):
        assert time.monotonic() < deadline, script
        time.sleep(0.05)


def at(site, query=""):
    return f"http://127.0.0.1:{site.port}/{query}"
