"""Object storage by URL: s3, gs and az, and http(s) for reading.

Endpoints, credentials and the settings of the client are decided here, for stores and tars alike.
"""

import base64
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Self
from urllib.parse import unquote_to_bytes, urlsplit

from bigscl.common.url_secrets import AGAIN, public, take, with_secret
from bigscl.store.backends.retries import Credentials
from bigscl.store.errors import StoreError

# The client itself retries single requests whose connection fails or whose answer is 5xx: a listing of many
# pages or an upload of many parts would otherwise start again from its beginning. Its tries are few, and
# bodies that break off are not always among them; what it gives up on, `RetryPolicy` retries as a whole.
BACKOFF = {"init_backoff": timedelta(milliseconds=50), "max_backoff": timedelta(seconds=2), "base": 2}
RETRY_CONFIG: Any = {"max_retries": 4, "retry_timeout": timedelta(seconds=30), "backoff": BACKOFF}
# The client's default of 30 s is for a whole body: too short for large chunks over a slow line. An address
# that swallows packets is given up on after 5 tries of 5 s.
CLIENT_OPTIONS = {"connect_timeout": "5s", "timeout": "120s"}
AZURE_ACCOUNT, AZURE_CONNECTION = "AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_CONNECTION_STRING"
ENDPOINT = re.compile(r"https?://[\w.:\[\]-]+(/\S*)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageOptions:
    """How to reach an object store; credentials come from the environment and are never written down."""

    endpoint: str | None = None
    region: str | None = None
    anonymous: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """A prefix of a bucket, or one object."""

    url: str
    scheme: str
    bucket: str
    path: str
    options: StorageOptions = field(default_factory=StorageOptions)

    @classmethod
    def parse(cls, url: str, options: StorageOptions | None = None) -> Self:
        """The location that a URL names, or StoreError if no client could reach it."""
        url = take(url)
        scheme, _, rest = url.partition("://")
        bucket, _, path = rest.partition("/")
        location = cls(url=url, scheme=scheme, bucket=bucket, path=path, options=options or StorageOptions())
        # The client panics, with a page of text, on an endpoint that is no address.
        location._refuse_secrets()
        if not bucket or not ENDPOINT.fullmatch(location.endpoint or "https://aws"):
            found = f"bucket {bucket!r}, endpoint {location.endpoint!r}"
            raise StoreError(
                f"{url}: {found}; expected {scheme}://bucket/prefix and, for a server of your own, "
                f"an endpoint such as https://host:port. Correct them."
            )
        return location

    def _refuse_secrets(self) -> None:
        """Raise StoreError for a secret in the URL of a bucket, or of its server: no client takes it."""
        if self.scheme in ("http", "https"):
            return
        for url in (self.url, self.endpoint or ""):
            if with_secret(url) != url or public(url) != url:
                raise StoreError(
                    f"{public(url)}: has a user, a password or a query in its URL. Leave them out: "
                    f"credentials come from the environment. {self.credentials.missing}"
                )

    @property
    def endpoint(self) -> str | None:
        """The address of the server, where it is not the default one."""
        if self.scheme in ("http", "https"):
            return f"{self.scheme}://{self.bucket}"
        return self.options.endpoint or SCHEMES[self.scheme].endpoint() or None

    @property
    def server(self) -> str:
        """The bucket and its endpoint, which answer for all its objects."""
        return f"{self.scheme}://{self.bucket} {self.endpoint}"

    @property
    def credentials(self) -> Credentials:
        return SCHEMES[self.scheme].credentials

    def client(self, prefix: str = "") -> Any:
        """An obstore client for the keys below a prefix of the bucket."""
        client_options = {**CLIENT_OPTIONS, "allow_http": (self.endpoint or "").startswith("http://")}
        settings = {"client_options": client_options, "retry_config": RETRY_CONFIG}
        if prefix:
            settings["prefix"] = prefix
        if self.endpoint and self.scheme not in ("http", "https"):
            settings["endpoint"] = self.endpoint
        if self.options.anonymous and self.scheme not in ("http", "https"):
            settings["skip_signature"] = True
        return SCHEMES[self.scheme].connect(self, settings)

    def object(self) -> tuple[Any, str]:
        """(client, key) of the object that the URL names."""
        # All of an http URL, with its query, is the client's root.
        return self.client(), "" if self.scheme in ("http", "https") else self.path


def _s3(location: Location, settings: dict[str, Any]) -> Any:
    from obstore.store import S3Store

    region = location.options.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    settings["region"] = region or "us-east-1"
    return S3Store(location.bucket, **settings)


def _gs(location: Location, settings: dict[str, Any]) -> Any:
    from obstore.store import GCSStore

    if "endpoint" in settings:
        settings["base_url"] = settings.pop("endpoint")
    return GCSStore(location.bucket, **settings)


def _az(location: Location, settings: dict[str, Any]) -> Any:
    from obstore.store import AzureStore

    if not os.environ.get(AZURE_ACCOUNT):
        given = _azure_connection()
        if not given:
            raise StoreError(
                f"{location.url}: set {AZURE_ACCOUNT} to the account of this container, or set "
                f"{AZURE_CONNECTION}."
            )
        settings |= {name: value for name, value in given.items() if value and name not in settings}
    return AzureStore(location.bucket, **settings)


def _azure_connection() -> dict[str, str | None]:
    """The parts of Azure's connection string; none without one, or beside a variable with the account."""
    text = os.environ.get(AZURE_CONNECTION, "")
    if not text or os.environ.get(AZURE_ACCOUNT):
        return {}
    pairs = (part.partition("=") for part in text.split(";"))
    parts = {name.strip().lower(): value.strip() for name, _, value in pairs}
    account, endpoint = parts.get("accountname"), parts.get("blobendpoint")
    if endpoint and not account:  # https://ACCOUNT.blob.core.windows.net, or http://host:port/ACCOUNT
        address = urlsplit(endpoint)
        account = address.path.strip("/") or (address.hostname or "").partition(".")[0]
    if not account:
        raise StoreError(
            f"{AZURE_CONNECTION}: has no AccountName, expected AccountName=...;AccountKey=... as Azure's "
            f"portal shows it. Copy it again."
        )
    suffix = parts.get("endpointsuffix")
    if suffix and not endpoint:
        endpoint = f"{parts.get('defaultendpointsprotocol', 'https')}://{account}.blob.{suffix}"
    return {
        "account_name": account,
        "account_key": parts.get("accountkey"),
        "sas_token": parts.get("sharedaccesssignature", "").removeprefix("?"),
        "endpoint": (endpoint or "").rstrip("/") or None,
    }


def _http(location: Location, settings: dict[str, Any]) -> Any:
    from obstore.store import HTTPStore

    parts = urlsplit(with_secret(location.url))
    user, at, host = parts.netloc.rpartition("@")
    if at:  # The client would leave them out of its requests.
        login = b"Basic " + base64.b64encode(unquote_to_bytes(user))
        settings["client_options"]["default_headers"] = {"Authorization": login}
    return HTTPStore.from_url(parts._replace(netloc=host).geturl(), **settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    connect: Callable[[Location, dict[str, Any]], Any]
    credentials: Credentials
    endpoint: Callable[[], str | None] = lambda: None
    """Returns the address of the server that the environment names."""
    holds_stores: bool = True
    """Whether it can be listed and written to."""


_HTTP = Scheme(
    connect=_http,
    credentials=Credentials(
        missing="Check the URL.", refused=f"Check the URL, and its signature or password. {AGAIN}"
    ),
    holds_stores=False,
)
SCHEMES = {
    "s3": Scheme(
        connect=_s3,
        endpoint=lambda: os.environ.get("AWS_ENDPOINT_URL"),
        credentials=Credentials(
            missing="Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or choose anonymous access for public "
            "data.",
            refused="Check AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, and what they "
            "permit there.",
        ),
    ),
    "gs": Scheme(
        connect=_gs,
        endpoint=lambda: os.environ.get("GOOGLE_BASE_URL"),
        credentials=Credentials(
            missing="Set GOOGLE_APPLICATION_CREDENTIALS, or choose anonymous access for public data.",
            refused="Check GOOGLE_APPLICATION_CREDENTIALS, and what that account may do there.",
        ),
    ),
    "az": Scheme(
        connect=_az,
        endpoint=lambda: os.environ.get("AZURE_STORAGE_ENDPOINT") or _azure_connection().get("endpoint"),
        credentials=Credentials(
            missing="Set AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN or "
            "AZURE_STORAGE_CONNECTION_STRING, or choose anonymous access for public data.",
            refused="Check AZURE_STORAGE_ACCOUNT_NAME, AZURE_STORAGE_ACCOUNT_KEY and "
            "AZURE_STORAGE_SAS_TOKEN, or AZURE_STORAGE_CONNECTION_STRING, and what they permit there.",
        ),
    ),
    "http": _HTTP,
    "https": _HTTP,
}
STORE_SCHEMES = tuple(name for name, scheme in SCHEMES.items() if scheme.holds_stores)
