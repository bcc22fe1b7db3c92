"""The server of the page: who may ask, for what, and how the answers are sent.

It is the standard library's. Its rules are few. A request names its host, which must be one of ours: a page
that has rebound its name to this address is refused. Requests of other origins are refused. Writes need the
token in a header, and anything at all needs it if others than this machine can connect. No part of a request
is used as a path: files are those of a table, samples are numbers.
"""

import hashlib
import hmac
import ipaddress
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from http.cookies import CookieError, SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bigscl.common.user_error import UserError
from bigscl.tools.viewer.request import Parameters, Reply, as_json

STATIC = Path(__file__).parent / "static"
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    **{
        f"/{name}.js": (f"{name}.js", "text/javascript; charset=utf-8")
        for name in (
            *("app", "dom", "marks", "answers", "selection", "zoom", "chart"),
            *("samples", "sample", "classes", "run", "ask"),
        )
    },
    "/style.css": ("style.css", "text/css; charset=utf-8"),
    "/icon.svg": ("icon.svg", "image/svg+xml"),
}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cross-Origin-Opener-Policy": "same-origin",
}
LARGEST_BODY = 65_536
MOST_CONNECTIONS = 64
# From the end of the last answer to the end of the request, and to take the answer, however steadily.
SECONDS_FOR_A_REQUEST = 30.0
SECONDS_TO_TAKE_AN_ANSWER = 120.0
Answer = Callable[[str, str], Reply]
"""From a path and its query."""
Write = Callable[[str, Any], Reply]
"""From a path and the JSON value that was sent."""


class Refused(Exception):
    """A request is not answered; the message says why."""

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class Server(ThreadingHTTPServer):
    """Answers requests of browsers, each in a thread."""

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, host: str, port: int, token: str, get: dict[str, Answer], post: dict[str, Write]
    ) -> None:
        self.token, self.get, self.post = token, get, post
        self._deadlines: dict[socket.socket, float | None] = {}
        """Of all connections; those whose answer is being made have none."""
        self._lock = threading.Lock()
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__((host, port), Handler)
        self.local = _is_loopback(host)
        self.hosts = {"localhost", "127.0.0.1", "::1"} if self.local else {host, socket.gethostname().lower()}
        # Only what the token's owner may derive from it: a cookie is sent to other ports of this host too.
        self.cookie = hashlib.sha256(b"read " + token.encode()).hexdigest()

    @property
    def address(self) -> str:
        """Return the address to open, with the token."""
        host, port = str(self.server_address[0]), self.server_address[1]
        if not self.local and ipaddress.ip_address(host).is_unspecified:
            host = socket.gethostname()
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/?token={self.token}"

    def knows_host(self, name: str) -> bool:
        """Return whether a browser that asks for this host means us.

        Names are ours only if we know them; an address is never the result of a lookup by name.
        """
        if name in self.hosts:
            return True
        return not self.local and _is_address(name)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Start the thread of a connection; if there are too many, end one that waits for its client."""
        with self._lock:
            is_full = len(self._deadlines) >= MOST_CONNECTIONS
            waiting = {connection: end for connection, end in self._deadlines.items() if end is not None}
            if is_full and waiting:
                self._drop(min(waiting, key=waiting.__getitem__))
            if not is_full or waiting:
                self._deadlines[request] = time.monotonic() + SECONDS_FOR_A_REQUEST
        if is_full and not waiting:
            self.shutdown_request(request)
        else:
            super().process_request(request, client_address)

    def wait_for_client(self, request: socket.socket, seconds: float | None) -> None:
        """Give a client so long for its part; with None it is our turn."""
        with self._lock:
            if request in self._deadlines:
                self._deadlines[request] = None if seconds is None else time.monotonic() + seconds

    def service_actions(self) -> None:
        """Drop the connections whose clients took too long; called a few times a second."""
        now = time.monotonic()
        with self._lock:
            for request in [
                connection for connection, end in self._deadlines.items() if end is not None and end < now
            ]:
                self._drop(request)

    def _drop(self, request: socket.socket) -> None:
        """End a connection; its thread, which waits for it, closes it."""
        del self._deadlines[request]
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Be silent about connections that browsers drop."""


def _is_loopback(host: str) -> bool:
    return host == "localhost" or (_is_address(host) and ipaddress.ip_address(host).is_loopback)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "bigscl", ""
    timeout = SECONDS_FOR_A_REQUEST
    # Without these a small answer waits for an acknowledgement, 40 ms.
    disable_nagle_algorithm = True
    wbufsize = -1

    def handle_one_request(self) -> None:
        self.server.wait_for_client(self.connection, SECONDS_FOR_A_REQUEST)
        super().handle_one_request()

    def do_GET(self) -> None:
        self._answer(self._get)

    def do_POST(self) -> None:
        self._answer(self._post)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - as above
        """Print nothing: addresses contain the token."""

    def _answer(self, answer: Callable[[], Reply]) -> None:
        try:
            self._check()
            reply = answer()
        except Refused as refused:
            # What was sent with a refused request was not read.
            self.close_connection = True
            reply = as_json({"error": str(refused)}, refused.status)
        self.server.wait_for_client(self.connection, SECONDS_TO_TAKE_AN_ANSWER)
        self.send_response(reply.status)
        for name, value in {**HEADERS, "Cache-Control": "no-store", **reply.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", reply.type)
        if reply.parts is None:
            self.send_header("Content-Length", str(len(reply.body)))
        else:
            self.send_header("Transfer-Encoding", "chunked")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if reply.parts is not None:
            self._send_parts(reply.parts)
        self.wfile.write(reply.body)
        self.wfile.flush()

    def _send_parts(self, parts: Iterator[bytes]) -> None:
        """Send what is made while it is sent; a client that gets no end of it knows that it is not whole."""
        left = SECONDS_TO_TAKE_AN_ANSWER
        for part in parts:
            self.server.wait_for_client(self.connection, left)
            start = time.monotonic()
            self.wfile.write(f"{len(part):x}\r\n".encode() + part + b"\r\n")
            self.wfile.flush()
            left -= time.monotonic() - start
            self.server.wait_for_client(self.connection, None)
        self.server.wait_for_client(self.connection, left)
        self.wfile.write(b"0\r\n\r\n")

    # Who may ask

    def _check(self) -> None:
        hosts = self.headers.get_all("Host") or []
        if len(hosts) != 1 or not self.server.knows_host(_host_of(hosts[0])):
            raise Refused(421, "this host name is not ours: open the address that `bigscl view` printed")
        origin = self.headers.get("Origin")
        if origin is not None and origin != f"http://{hosts[0]}":
            raise Refused(403, "requests of other origins are refused")
        if (
            self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin")
            and not self._navigates()
        ):
            raise Refused(403, "requests of other pages are refused")
        if self.headers.get("Transfer-Encoding") is not None:
            raise Refused(411, "a request must state its length")
        if not self.server.local and not self._may_read():
            raise Refused(401, "open the address that `bigscl view` printed: it has the token")

    def _navigates(self) -> bool:
        """Return whether a person follows a link to the page, from wherever."""
        return self.headers.get("Sec-Fetch-Mode") == "navigate" and urlsplit(self.path).path == "/"

    def _may_read(self) -> bool:
        return self._has_token() or self._has_cookie() or self._offers_token()

    def _has_token(self) -> bool:
        return _same(self.headers.get("X-Bigscl-Token", ""), self.server.token)

    def _offers_token(self) -> bool:
        parts = urlsplit(self.path)
        return parts.path == "/" and _same(self._parameters(parts.query).text("token"), self.server.token)

    def _has_cookie(self) -> bool:
        try:
            cookie = SimpleCookie(self.headers.get("Cookie", "")).get(self._cookie_name)
        except CookieError:
            return False
        return cookie is not None and _same(cookie.value, self.server.cookie)

    @property
    def _cookie_name(self) -> str:
        return f"bigscl-view-{self.server.server_address[1]}"

    def _parameters(self, query: str) -> Parameters:
        try:
            return Parameters(query)
        except UserError as error:
            raise Refused(400, str(error)) from None

    # What is asked

    def _get(self) -> Reply:
        if self._length() != 0:
            raise Refused(400, "a request that reads has no body")
        self.server.wait_for_client(self.connection, None)
        parts = urlsplit(self.path)
        if self._offers_token():
            # The token leaves the address: as a cookie that may read, and for the page after the #.
            cookie = f"{self._cookie_name}={self.server.cookie}; HttpOnly; SameSite=Strict; Path=/"
            rest = self._parameters(parts.query).without("token")
            headers = {"Location": f"/?{rest}#{self.server.token}", "Set-Cookie": cookie}
            return Reply(body=b"", status=303, headers=headers)
        if parts.path in FILES:
            name, kind = FILES[parts.path]
            return Reply(body=(STATIC / name).read_bytes(), type=kind, headers={"Cache-Control": "no-cache"})
        answer = self.server.get.get(parts.path)
        if answer is None:
            raise Refused(404, "there is no such page")
        return answer(parts.path, parts.query)

    def _post(self) -> Reply:
        if not self._has_token():
            raise Refused(401, "to answer, open the address that `bigscl view` printed: it has the token")
        if self.headers.get("Origin") is None and self.headers.get("Sec-Fetch-Site") is not None:
            raise Refused(403, "a browser must say where a write comes from")
        if self.headers.get_content_type() != "application/json":
            raise Refused(415, "expected application/json")
        write = self.server.post.get(urlsplit(self.path).path)
        if write is None:
            raise Refused(404, "there is no such page")
        body = self._body()
        self.server.wait_for_client(self.connection, None)
        return write(urlsplit(self.path).path, body)

    def _length(self) -> int:
        """Return the length of the body; refuse a request that leaves it in doubt.

        What is not read of a body would be the next request.
        """
        length, *others = self.headers.get_all("Content-Length") or ["0"]
        # A line that is no header, as one with a space in its name, hides the headers after it.
        if others or self.headers.defects or self.headers.get_payload():
            raise Refused(400, "the headers are malformed")
        if not (length.isascii() and length.isdecimal() and len(length) < 10 and int(length) <= LARGEST_BODY):
            raise Refused(413, f"expected at most {LARGEST_BODY} bytes")
        return int(length)

    def _body(self) -> Any:
        try:
            return json.loads(self.rfile.read(self._length()))
        except (ValueError, RecursionError):
            raise Refused(400, "expected JSON") from None


def _host_of(header: str) -> str:
    """Return the name in a Host header, without port and brackets; empty if it is none."""
    try:
        return (urlsplit(f"//{header}").hostname or "").lower()
    except ValueError:
        return ""


def _same(given: str, wanted: str) -> bool:
    return hmac.compare_digest(given.encode(errors="replace"), wanted.encode())
