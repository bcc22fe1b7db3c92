"""A server that answers like GCS (XML API) and Azure Blob Storage, as far as stores and tars ask."""

import http.server
import itertools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from urllib.parse import parse_qs, unquote, urlparse
from xml.sax.saxutils import escape


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Headers and content are two packets: without this each answer waits 40 ms for the ACK of the first.
    disable_nagle_algorithm = True
    objects: dict[str, tuple[bytes, int]]
    versions: Iterator[int]
    lock: threading.Lock
    keeps_conditions: bool

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parsed = urlparse(self.path)
        key, query = unquote(parsed.path).strip("/"), parse_qs(parsed.query)
        with self.lock:
            if "list-type" in query or query.get("comp") == ["list"]:
                self.answer(200, _listing(self.objects, key, query))
            elif query.get("comp") == ["batch"]:
                self.delete_batch(body)
            else:
                getattr(self, self.command.lower())(key, body)

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = serve  # noqa: N815

    def put(self, key: str, body: bytes) -> None:
        found = self.objects.get(key)
        if not self.keeps_conditions:
            self.store(key, body)
            return
        wanted = self.headers.get("x-goog-if-generation-match")
        if self.headers.get("If-None-Match") == "*" and found:
            self.answer(409, b"<Error><Code>BlobAlreadyExists</Code></Error>")
        elif wanted is not None and wanted != str(found[1] if found else 0):
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
        elif (tag := self.headers.get("If-Match")) and (not found or tag != _tag(found[1])):
            self.answer(412, b"<Error><Code>ConditionNotMet</Code></Error>")
        else:
            self.store(key, body)

    def store(self, key: str, body: bytes) -> None:
        self.objects[key] = body, next(self.versions)
        self.answer(201 if self.headers.get("x-ms-blob-type") else 200, b"", self.objects[key][1])

    def get(self, key: str, body: bytes) -> None:
        if key not in self.objects:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        data, version = self.objects[key]
        wanted = re.match(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if wanted:
            first, last = int(wanted[1]), int(wanted[2] or len(data) - 1)
            part = data[first : last + 1]
            self.answer(206, part, version, f"bytes {first}-{first + len(part) - 1}/{len(data)}")
        else:
            self.answer(200, data, version)

    head = get

    def delete(self, key: str, body: bytes) -> None:
        self.answer(202 if self.objects.pop(key, None) else 404, b"")

    def delete_batch(self, body: bytes) -> None:
        parts = []
        for number, path in enumerate(re.findall(rb"DELETE (\S+) HTTP/1.1", body)):
            gone = self.objects.pop(unquote(path.decode()).partition("?")[0].strip("/"), None)
            status = b"202 Accepted" if gone else b"404 The specified blob does not exist."
            parts.append(
                b"--batch\r\nContent-Type: application/http\r\nContent-ID: %d\r\n\r\n"
                b"HTTP/1.1 %s\r\n%s\r\n\r\n"
                % (number, status, b"" if gone else b"x-ms-error-code: BlobNotFound\r\n")
            )
        self.answer(202, b"".join(parts) + b"--batch--\r\n", kind="multipart/mixed; boundary=batch")

    def answer(
        self,
        status: int,
        content: bytes,
        version: int = 0,
        content_range: str = "",
        kind: str = "application/xml",
    ) -> None:
        self.send_response(status)
        self.send_header("ETag", _tag(version))
        self.send_header("x-goog-generation", str(version))
        self.send_header("Last-Modified", formatdate(1e9 + version, usegmt=True))
        self.send_header("Content-Type", kind)
        if content_range:
            self.send_header("Content-Range", content_range)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *args: object) -> None:
        pass


def _tag(version: int) -> str:
    return f'"{version}"'


def _listing(objects: dict[str, tuple[bytes, int]], bucket: str, query: dict[str, list[str]]) -> bytes:
    prefix, azure = query.get("prefix", [""])[0], "comp" in query
    names = [key.removeprefix(f"{bucket}/") for key in objects if key.startswith(f"{bucket}/{prefix}")]
    folders = set()
    if "delimiter" in query:
        folders = {name[: name.index("/", len(prefix)) + 1] for name in names if "/" in name[len(prefix) :]}
        names = [name for name in names if "/" not in name[len(prefix) :]]
    entry = _azure_entry if azure else _entry
    entries = "".join(entry(name, *objects[f"{bucket}/{name}"]) for name in sorted(names))
    if azure:
        below = "".join(f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>" for name in sorted(folders))
        return f"<EnumerationResults><Blobs>{below}{entries}</Blobs></EnumerationResults>".encode()
    below = "".join(
        f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>" for name in sorted(folders)
    )
    return f"<ListBucketResult>{entries}{below}</ListBucketResult>".encode()


def _entry(name: str, data: bytes, version: int) -> str:
    return (
        f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size>"
        f"<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>{version}</ETag></Contents>"
    )


def _azure_entry(name: str, data: bytes, version: int) -> str:
    return (
        f"<Blob><Name>{escape(name)}</Name><Properties><Last-Modified>{formatdate(1e9, usegmt=True)}"
        f"</Last-Modified><Content-Length>{len(data)}</Content-Length><Content-Type>x</Content-Type>"
        f"<Etag>{version}</Etag></Properties></Blob>"
    )


@contextmanager
def fake_buckets(
    objects: dict[str, tuple[bytes, int]] | None = None, *, keeps_conditions: bool = True
) -> Iterator[str]:
    """The address of a running server; buckets and containers need not be created.

    Servers that share `objects` show the same ones. Without `keeps_conditions`, it stores what a condition
    (If-None-Match and the like) forbids, as rclone does.
    """
    parts = {
        "objects": {} if objects is None else objects,
        "versions": itertools.count(1),
        "lock": threading.Lock(),
        "keeps_conditions": keeps_conditions,
    }
    handler = type("Handler", (_Handler,), parts)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()
