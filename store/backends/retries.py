"""Retries of requests to an object store: which errors are temporary, how long to wait, what to report."""

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from bigscl.common.url_secrets import hide
from bigscl.store.errors import StoreError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A server that answered before may be restarting; one that never did has most likely a mistyped address.
RETRY_SECONDS = 120.0
FIRST_CONTACT_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0

# Where the client asks for a machine's own credentials if the environment has none.
METADATA_SERVICE = re.compile(r"https?://[^/]+/latest/(api/token|meta-data)|https?://169\.254\.")
# Permanent failures, and what to do about them; the first pattern that matches counts.
NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>")
HINTS = (
    (NO_BUCKET.pattern, "Create the bucket, or correct its name in the URL."),
    (r"Content-Length Header missing", "Use a server that states the length, or pipe:curl -sf URL."),
    (r"status code: 40[13]", "{refused}"),
    (r"[Cc]redential", "{missing}"),
    (r"[Rr]edirect|status code: 3\d\d", "Set the region of the bucket, or correct the endpoint."),
    (r"status code: 501", "Use a server that implements this request, or a store on disk."),
    (r"status code: 4(?!08|29)\d\d", "Check the URL, the endpoint and the region."),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    missing: str
    refused: str


class NotImplementedByServer(StoreError):
    """The server lacks this kind of request."""


def cause_of(error: Exception) -> str:
    """One line about a failure of the client, without its debug output and without secrets."""
    text, _, debug = hide(str(error)).partition("Debug source:")
    line = " ".join(text.split())
    if status := re.search(r" - Server returned non-2xx status code: (\d{3}[^:]*)", line):
        fields = [re.search(f"<{name}>(.*?)</{name}>", line) for name in ("Code", "Message")]
        return ": ".join([status[1], *(field[1] for field in fields if field)]).rstrip(". ")[:200]
    reason = line.rpartition(" - ")[2]
    below = re.findall(r'(?:message|error): "([^"]+)"', debug)
    if "IncompleteMessage" in debug:
        below = ["the connection was closed before the answer"]
    return f"{reason} ({below[-1]})"[:300] if below else reason[:200]


def hint_for(error: Exception, credentials: Credentials) -> str | None:
    """Return the advice about a permanent failure; None for one that may be temporary."""
    text = str(error).partition("Debug source:")[0]
    # Addresses are left out: a bucket may be called "credentials".
    address = re.search(r"Error performing [A-Z]+ (\S+)", text)
    reason = text.replace(address[1], "") if address else text
    if address and METADATA_SERVICE.match(address[1]):
        return credentials.missing
    hint = next((hint for pattern, hint in HINTS if re.search(pattern, reason)), None)
    return hint and hint.format(missing=credentials.missing, refused=credentials.refused)


class _Attempts:
    """The tries of one operation, which end at a deadline."""

    def __init__(self, place: str, doing: str, credentials: Credentials, seconds: float) -> None:
        self._place, self._doing, self._credentials = place, doing, credentials
        self._start, self._seconds = time.monotonic(), seconds
        self._count = 0

    def pause_after(self, error: Exception) -> float:
        """Seconds to wait before the next try; raises StoreError if that would be useless or too late."""
        self._count += 1
        failed = f"{self._place}: could not {self._doing}: {cause_of(error)}"
        if hint := hint_for(error, self._credentials):
            kind = NotImplementedByServer if "status code: 501" in str(error) else StoreError
            raise kind(f"{failed}. {hint}") from error
        passed = time.monotonic() - self._start
        pause: float = min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * 2 ** (self._count - 1))
        if passed + pause > self._seconds:
            raise StoreError(
                f"{failed}; gave up after {self._count} tries in {passed:.0f} s. Check that the server runs "
                f"and can be reached from here, then run the same command again."
            ) from error
        logger.log(logging.WARNING if pause >= 1 else logging.DEBUG, "%s; next try in %.1f s", failed, pause)
        # Jitter: many ranks that failed together should not come back together.
        return pause * random.uniform(0.5, 1.0)


class RetryPolicy:
    """Runs operations at one place, and repeats them while they fail with temporary errors.

    An operation may run twice although it succeeded the first time: its answer may have been lost. What
    means something to the caller passes through: a missing object, one that exists, a failed precondition.
    """

    def __init__(
        self,
        place: str,
        credentials: Credentials,
        *,
        retry_seconds: float | None = None,
        first_contact_seconds: float | None = None,
    ) -> None:
        self._place = place
        self._credentials = credentials
        self._retry_seconds = retry_seconds
        self._first_contact_seconds = first_contact_seconds
        self._reached = False

    def call(self, doing: str, operation: Callable[[], T], place: str | None = None) -> T:
        """The result of the operation; `doing` completes "could not ...", at this place of the server."""
        attempts = self._attempts(doing, place)
        while True:
            try:
                result = operation()
            except Exception as error:
                time.sleep(self._pause(attempts, error))
            else:
                self._reached = True
                return result

    async def wait_for(self, doing: str, operation: Callable[[], Awaitable[T]]) -> T:
        """The same for a coroutine."""
        attempts = self._attempts(doing)
        while True:
            try:
                result = await operation()
            except Exception as error:
                await asyncio.sleep(self._pause(attempts, error))
            else:
                self._reached = True
                return result

    def _attempts(self, doing: str, place: str | None = None) -> _Attempts:
        own = self._retry_seconds if self._reached else self._first_contact_seconds
        usual = RETRY_SECONDS if self._reached else FIRST_CONTACT_SECONDS
        seconds = usual if own is None else own
        return _Attempts(place or self._place, doing, self._credentials, seconds)

    def _pause(self, attempts: _Attempts, error: Exception) -> float:
        from obstore import exceptions

        self._reached |= "status code:" in str(error)
        if isinstance(error, FileNotFoundError) and NO_BUCKET.search(str(error)):
            return attempts.pause_after(error)
        known = (exceptions.AlreadyExistsError, exceptions.NotSupportedError, exceptions.PreconditionError)
        if isinstance(error, known) or not isinstance(error, exceptions.BaseError | ConnectionError):
            raise error  # it means something to the caller, or is a bug
        return attempts.pause_after(error)
