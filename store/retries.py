"""Patience with an object store: which failures pass, how long to wait, and what to say in the end."""

import asyncio
import logging
import random
import re
import time
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Any, TypeVar

from bigscl.store.errors import StoreError

logger = logging.getLogger(__name__)
T = TypeVar("T")

# A server that answered before may be restarting; one that never did has most likely a mistyped address.
RETRY_SECONDS = 120.0
FIRST_CONTACT_SECONDS = 5.0
FIRST_PAUSE_SECONDS = 0.1
LONGEST_PAUSE_SECONDS = 5.0

# The client itself retries single requests whose connection fails or whose answer is 5xx: a listing of many
# pages or an upload of many parts would otherwise start again from its beginning. Its tries are few, and
# bodies that break off are not always among them; what it gives up on is retried here, as a whole.
RETRY_CONFIG: Any = {
    "max_retries": 4,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {
        "init_backoff": timedelta(milliseconds=50),
        "max_backoff": timedelta(seconds=2),
        "base": 2,
    },
}
# The client's default of 30 s is for a whole body: too short for large chunks over a slow line. An address
# that swallows packets is given up on after 5 tries of 5 s.
CLIENT_OPTIONS = {"connect_timeout": "5s", "timeout": "120s"}

# Where the client asks for a machine's own credentials if the environment has none.
METADATA_SERVICE = re.compile(r"https?://[^/]+/latest/(api/token|meta-data)|https?://169\.254\.")
NO_CREDENTIALS = (
    "Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or choose anonymous access for public data."
)

# What no waiting changes, and what to do about it; the first pattern found counts.
HINTS = (
    (r"<Code>NoSuchBucket</Code>", "Create the bucket, or correct its name in the URL."),
    (
        r"status code: 40[13]",
        "Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, and what they permit there.",
    ),
    (r"[Cc]redential", NO_CREDENTIALS),
    (r"[Rr]edirect|status code: 3\d\d", "Set the region of the bucket, or correct the endpoint."),
    (r"status code: 501", "Use a server that implements this request, or a store on disk."),
    (r"status code: 4(?!08|29)\d\d", "Check the URL, the endpoint and the region."),
)


class NotImplementedByServer(StoreError):
    """The server lacks this kind of request."""


def cause_of(error: Exception) -> str:
    """One line about a failure of the client, without its dump of debug output."""
    text, _, debug = str(error).partition("Debug source:")
    reason = " ".join(text.split()).rpartition(" - ")[2]
    if status := re.search(r"status code: (\d{3}[^:]*)", reason):
        fields = [re.search(f"<{name}>(.*?)</{name}>", reason) for name in ("Code", "Message")]
        return ": ".join([status[1], *(field[1] for field in fields if field)]).rstrip(". ")[:200]
    below = re.findall(r'(?:message|error): "([^"]+)"', debug)
    if "IncompleteMessage" in debug:
        below = ["the connection was closed before the answer"]
    return f"{reason} ({below[-1]})"[:300] if below else reason[:200]


def hint_for(error: Exception) -> str | None:
    """What to do about a failure that no waiting changes; None for one that may pass."""
    text = str(error).partition("Debug source:")[0]
    # Addresses are left out: a bucket may well be called "credentials".
    address = re.search(r"Error performing [A-Z]+ (\S+)", text)
    reason = text.replace(address[1], "") if address else text
    if address and METADATA_SERVICE.match(address[1]):
        return NO_CREDENTIALS
    return next((hint for pattern, hint in HINTS if re.search(pattern, reason)), None)


class _Attempts:
    """The tries of one operation, which end at a deadline."""

    def __init__(self, place: str, doing: str, seconds: float) -> None:
        self._place, self._doing = place, doing
        self._start, self._seconds = time.monotonic(), seconds
        self._count = 0

    def pause_after(self, error: Exception) -> float:
        """Seconds to wait before the next try; raises StoreError if that would be useless or too late."""
        self._count += 1
        failed = f"{self._place}: could not {self._doing}: {cause_of(error)}"
        if hint := hint_for(error):
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


class Patience:
    """Runs operations on one place, again while they fail for reasons that pass.

    An operation may run twice although it succeeded the first time: its answer may have been lost. What
    means something to the caller passes through: a missing object, one that exists, a failed precondition.
    """

    def __init__(self, place: str) -> None:
        self._place = place
        self._reached = False

    def call(self, doing: str, operation: Callable[[], T]) -> T:
        """What the operation gives back; `doing` completes "could not ..."."""
        attempts = self._attempts(doing)
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

    def _attempts(self, doing: str) -> _Attempts:
        return _Attempts(self._place, doing, RETRY_SECONDS if self._reached else FIRST_CONTACT_SECONDS)

    def _pause(self, attempts: _Attempts, error: Exception) -> float:
        from obstore import exceptions

        self._reached |= "status code:" in str(error)
        if isinstance(error, FileNotFoundError) and "<Code>NoSuchBucket</Code>" in str(error):
            return attempts.pause_after(error)
        means_something = (
            exceptions.AlreadyExistsError,
            exceptions.NotSupportedError,
            exceptions.PreconditionError,
        )
        if isinstance(error, exceptions.BaseError) and not isinstance(error, means_something):
            return attempts.pause_after(error)
        raise error
