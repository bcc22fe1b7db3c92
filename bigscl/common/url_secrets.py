"""Secrets in URLs: signatures and passwords stay in the memory of this process.

A URL that enters (a word of a command line, a value of a config, a pattern of shards) goes through `take` at
once. What it returns, the public form, is what the program works with: shows, hashes, compares and writes.
`with_secret` joins the two again where a request is made, and nowhere else. What others write about requests,
such as the errors of a client, goes through `hide`. Other processes get the secrets by `environment`.
"""

import logging
import os
import re
from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

from braceexpand import braceexpand

VARIABLE = "BIGSCL_URLS"
"""Environment variable with URLs, or patterns, and their secrets: one in each line."""
AGAIN = f"Signatures and passwords are not written down: give the URL with its own, here or in {VARIABLE}."
REMOVED = "..."
TAR_ENDS = (".tar", ".tgz", ".tar.gz")
# Shorter values may be words of any text.
SHORTEST_PASSWORD, SHORTEST_VALUE = 6, 16

USER = re.compile(r"(\bhttps?://)[^\s/?#]*@|(\b[a-z][a-z0-9+.-]*://)[^\s/?#]*:[^\s/?#]*@", re.IGNORECASE)
HTTP = re.compile(r"\bhttps?://", re.IGNORECASE)
# In a bucket, a question mark is that of a glob, unless it starts `?name=value`.
HTTP_QUERY, BUCKET_QUERY = re.compile(r"[?#]"), re.compile(r"\?(?=[\w.-]+=)")
URL_IN_TEXT = re.compile(r"\b[a-z][a-z0-9+.-]*://[^\s\"'<>`|]+", re.IGNORECASE)
WORD = re.compile(r"[^\s\"'`|;<>()]+")

_given: dict[str, str] = {}
"""Patterns as they came in, by their public form."""
_complete: dict[str, str] = {}
"""The URLs that they stand for, by their public form."""


def public(url: str) -> str:
    """Return a URL, or a pattern with braces, without user, password and query; of a pipe, what it reads.

    A path stays as it is. Of a command its name and the tars that it names are left, and dots for the rest.
    """
    if url.startswith("pipe:"):
        return _public_command(url)
    return _without_queries(USER.sub(_scheme_only, url)) if "://" in url else url


def take(url: str) -> str:
    """Return the public form of a URL, or of a pattern with braces, and keep its secrets in memory."""
    shown = public(url)
    if shown != url:
        _given[shown] = url
        _complete.update(_by_public_form(url))
    return shown


def take_all(value: Any) -> Any:
    """Return plain values, of any depth, with the public form of every URL in them; keep the secrets."""
    if isinstance(value, str):
        return take(value)
    if isinstance(value, dict):
        return {name: take_all(inner) for name, inner in value.items()}
    return type(value)(map(take_all, value)) if isinstance(value, list | tuple) else value


def take_words(words: Iterable[str]) -> list[str]:
    """Return the words of a command line with the public form of every URL; keep the secrets."""
    taken = []
    for word in words:
        option, equals, value = word.partition("=")
        is_option = word.startswith("-") and equals and "://" not in option
        taken.append(f"{option}={take(value)}" if is_option else take(word))
    return taken


def with_secret(url: str) -> str:
    """Return a URL as a request needs it; what this process was given comes before the environment."""
    return _complete.get(url) or _of_environment(os.environ.get(VARIABLE, "")).get(url, url)


def with_image_names(url: str) -> str:
    """Return where another tool finds images; a query stays if the name of an image is to be put into it."""
    given = with_secret(url)
    query = given.partition("?")[2]
    names_image = "&" not in query and ("{key}" in query or query.endswith(("=", "/")))
    return USER.sub(_scheme_only, given) if names_image else url


def lacks_command(url: str) -> bool:
    """Return whether this is the public form of a pipe whose command nobody has given."""
    return url.startswith("pipe:") and url.endswith(f" {REMOVED}") and with_secret(url) == url


def receive(variables: dict[str, str]) -> None:
    """Take the secrets of the process that started this one, from its `environment`; logs hide them."""
    os.environ.update(variables)
    hide_in_logs()


def environment() -> dict[str, str]:
    """Return the variable that gives the secrets of this process to another one; nothing without secrets."""
    lines = [*os.environ.get(VARIABLE, "").splitlines(), *_given.values()]
    return {VARIABLE: "\n".join(dict.fromkeys(lines))} if lines else {}


def hide(text: str) -> str:
    """Return a text without the secrets of this process, and without what looks like one in any URL."""
    complete = {**_of_environment(os.environ.get(VARIABLE, "")), **_complete}
    for shown, url in complete.items():
        text = text.replace(url, shown)
    secrets = {part for url in complete.values() for part in _secrets(url)}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, REMOVED)
    return URL_IN_TEXT.sub(lambda found: public(found[0]), text) if "://" in text else text


def hide_in_logs() -> None:
    """Let every log line of this process, whoever writes it, be without secrets."""
    make = logging.getLogRecordFactory()
    if getattr(make, "hides_secrets", False):
        return

    def record(*args: Any, **kwargs: Any) -> logging.LogRecord:
        made = make(*args, **kwargs)
        said = made.getMessage()
        if (hidden := hide(said)) != said:
            made.msg, made.args = hidden, ()
        if made.exc_info:
            made.exc_text = hide(logging.Formatter().formatException(made.exc_info))
        return made

    record.hides_secrets = True  # type: ignore[attr-defined]
    logging.setLogRecordFactory(record)


def _scheme_only(found: re.Match[str]) -> str:
    return found[1] or found[2]


def _public_command(url: str) -> str:
    words = WORD.findall(url.removeprefix("pipe:"))
    # A variable that is set for the command may be a secret.
    name = next((word for word in words if "=" not in word), "")
    tars = [shown for word in words if (shown := public(word)).endswith(TAR_ENDS) and word != name]
    shown = "pipe:" + " ".join([name, *tars])
    return url if shown == url else f"{shown} {REMOVED}"


def _without_queries(text: str) -> str:
    """Return the text without queries: each ends with the text, or with the part of the braces it is in."""
    starts = {match.start() for match in (HTTP_QUERY if HTTP.search(text) else BUCKET_QUERY).finditer(text)}
    kept, depth, inside = [], 0, None
    for position, letter in enumerate(text):
        if inside is None and position in starts:
            inside = depth
        elif inside and inside == depth and letter in ",}":
            inside = None
        depth += (letter == "{") - (letter == "}")
        if inside is None:
            kept.append(letter)
    return "".join(kept)


def _by_public_form(pattern: str) -> Iterator[tuple[str, str]]:
    """Yield (public form, URL) of every URL that a pattern stands for."""
    try:
        urls = [pattern] if pattern.startswith("pipe:") else braceexpand(pattern)
        yield from ((public(url), url) for url in urls)
    except ValueError:  # it is no pattern, as whoever expands it will say
        yield public(pattern), pattern


@lru_cache(maxsize=1)
def _of_environment(value: str) -> dict[str, str]:
    lines = (line.strip() for line in value.splitlines())
    return {shown: url for line in lines for shown, url in _by_public_form(line) if shown != url}


@lru_cache(maxsize=1 << 16)
def _secrets(url: str) -> tuple[str, ...]:
    """Return the parts of a URL, or of a command, that nobody may see, as they are and without %-escapes."""
    if url.startswith("pipe:"):
        shown = public(url)
        return tuple(word for word in WORD.findall(url) if len(word) >= SHORTEST_VALUE and word not in shown)
    _, _, query = url.partition("?")
    values = [part.partition("=")[2] for part in query.split("&")]
    user = USER.match(url)
    names = user[0].partition("://")[2].removesuffix("@") if user else ""
    passwords = [names, names.partition(":")[2]]
    secrets = [
        *(text for text in (query, *values) if len(text) >= SHORTEST_VALUE),
        *(text for text in passwords if len(text) >= SHORTEST_PASSWORD),
    ]
    return tuple({form for text in secrets for form in (text, unquote(text))})
