"""A bad connection: an HTTP proxy in front of a server, which spoils requests in chosen or random ways."""

import http.client
import http.server
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlparse

# drop: close before the request is forwarded; error: answer 500 or 503 instead; lose: forward it, but give no
# answer; cut: break off in the middle of a GET's body; refuse: answer 403 as S3 does for an unknown key.
Fault = Literal["drop", "error", "lose", "cut", "refuse"]
Choose = Callable[[str, str, int], Fault | None]
BODILESS = (204, 304)
REFUSAL = (
    b"<Error><Code>InvalidAccessKeyId</Code><Message>The key does not exist in our records.</Message></Error>"
)


@dataclass(frozen=True)
class Chances:
    """Each fault happens to this fraction of requests, independently of the others."""

    drop: float = 0.0
    error: float = 0.0
    lose: float = 0.0
    cut: float = 0.0
    seed: int = 0

    def __call__(self, method: str, path: str, count: int) -> Fault | None:
        """Drawn for the n-th request of its kind to this path: the order of threads changes nothing."""
        rng = random.Random(f"{self.seed} {method} {path} {count}")
        chances: list[tuple[Fault, float]] = [("drop", self.drop), ("error", self.error), ("lose", self.lose)]
        if method == "GET":
            chances.append(("cut", self.cut))
        return next((fault for fault, chance in chances if rng.random() < chance), None)


@dataclass
class Proxy:
    """What a test sees: the address, the requests so far, and how many were spoiled in which way."""

    endpoint: str
    faults: Counter[str] = field(default_factory=Counter)
    requests: list[tuple[str, str, dict[str, str]]] = field(default_factory=list)


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    upstream: str
    choose: Choose
    proxy: Proxy
    counts: Counter[tuple[str, str]]
    lock: threading.Lock

    def relay(self) -> None:
        self.close_connection = True
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        with self.lock:
            count = self.counts[self.command, self.path]
            self.counts[self.command, self.path] += 1
            self.proxy.requests.append((self.command, self.path, dict(self.headers.items())))
        fault = self.choose(self.command, self.path, count)
        if fault == "drop":
            self.note(fault)
        elif fault == "error":
            self.note(fault)
            self.answer(500 if count % 2 else 503, {}, b"")
        elif fault == "refuse":
            self.note(fault)
            self.answer(403, {"Content-Type": "application/xml"}, REFUSAL)
        else:
            status, headers, content = self.forward(body)
            if fault == "lose":
                self.note(fault)
            else:
                self.answer(
                    status, headers, content, cut=fault == "cut" and len(content) > 1 and status < 300
                )

    do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = relay  # noqa: N815

    def forward(self, body: bytes) -> tuple[int, dict[str, str], bytes]:
        connection = http.client.HTTPConnection(self.upstream, timeout=60)
        try:
            headers = {name: value for name, value in self.headers.items() if name.lower() != "connection"}
            connection.request(self.command, self.path, body, headers)
            found = connection.getresponse()
            return found.status, dict(found.getheaders()), found.read()
        finally:
            connection.close()

    def answer(self, status: int, headers: dict[str, str], content: bytes, *, cut: bool = False) -> None:
        self.send_response_only(status)
        for name, value in headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        if self.command == "HEAD":
            self.send_header("Content-Length", headers.get("Content-Length", "0"))
        elif status not in BODILESS:
            self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        if cut:
            self.note("cut")
            content = content[: len(content) // 2]
        self.wfile.write(content)

    def note(self, fault: str) -> None:
        with self.lock:
            self.proxy.faults[fault] += 1

    def log_message(self, *args: object) -> None:
        pass


class _Server(http.server.ThreadingHTTPServer):
    # Ranks and threads connect all at once; the default queue of 5 would refuse some of them.
    request_queue_size = 128

    def handle_error(self, request: object, client_address: object) -> None:
        """A client that went away is no error of ours."""


@contextmanager
def faulty_proxy(server: str, choose: Choose) -> Iterator[Proxy]:
    """A proxy in front of a server (http://host:port); `choose(method, path, count)` says what goes wrong."""
    proxy = Proxy("")
    parts = {
        "upstream": urlparse(server).netloc,
        "choose": staticmethod(choose),
        "proxy": proxy,
        "counts": Counter(),
        "lock": threading.Lock(),
    }
    with _Server(("127.0.0.1", 0), type("Handler", (_Handler,), parts)) as running:
        proxy.endpoint = f"http://127.0.0.1:{running.server_address[1]}"
        thread = threading.Thread(target=running.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield proxy
        finally:
            running.shutdown()
            thread.join()
