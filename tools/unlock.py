"""`bigscl unlock`: free a store from a run that died holding it."""

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from bigscl.store import (
    LEASE_PATIENCE_SECONDS,
    Backend,
    BadFile,
    Holder,
    break_lease,
    is_dead,
    open_backend,
    read_holder,
    read_spec,
)
from bigscl.tools.opening import Anonymous, Apply, AsJson, Endpoint, Region, Store, locate, options
from bigscl.tools.text import tell


def command(
    store: Store,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also from a holder that may be alive (it will fail to commit), or a damaged lease.",
        ),
    ] = False,
    apply: Apply = False,
    patience: Annotated[
        float,
        typer.Option(
            min=0, max=86_400, help="Seconds without a sign of life after which another host is dead."
        ),
    ] = LEASE_PATIENCE_SECONDS,
    endpoint: Endpoint = None,
    region: Region = None,
    anonymous: Anonymous = False,
    as_json: AsJson = False,
) -> None:
    """Say who holds a store and whether it is dead; with --apply, break the lease of a dead one.

    A run takes over the lease of a dead one by itself: this is for looking, and for the cases in doubt.

    Example: bigscl unlock runs/quickstart/store --apply
    """
    backend = open_backend(locate(store), options(endpoint, region, anonymous))
    read_spec(backend)
    lease = _examine(backend, patience)
    may = lease.exists and (lease.dead or force)
    broken = may and apply
    if broken:
        break_lease(backend, lease.holder)
    facts = {
        "url": backend.url,
        "holder": None if lease.holder is None else asdict(lease.holder),
        "damaged": lease.damage,
        "dead": lease.dead,
        "broken": broken,
    }
    tell(facts, _text(backend.url, lease, may, broken), as_json)
    if lease.exists and not may:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """What the lease file says."""

    holder: Holder | None = None
    damage: str | None = None
    """Why it cannot be read; then nobody knows who holds the store."""
    dead: bool = False

    @property
    def exists(self) -> bool:
        """Whether there is a lease at all."""
        return self.holder is not None or self.damage is not None


def _examine(backend: Backend, patience_seconds: float) -> State:
    try:
        holder = read_holder(backend)
    except BadFile as error:
        return State(damage=str(error))
    return State(holder=holder, dead=holder is not None and is_dead(backend, holder, patience_seconds))


def _text(url: str, lease: State, may: bool, broken: bool) -> str:
    done = "its lease is broken" if broken else _advice(may)
    if lease.damage is not None:
        return f"{lease.damage} Nobody can tell who holds the store; {done}"
    if lease.holder is None:
        return f"{url}: nobody holds it"
    state = "which is dead" if lease.dead else "which may be alive"
    return f"{url}: held by {lease.holder}, {state}; {done}"


def _advice(may: bool) -> str:
    if may:
        return "add --apply to break its lease"
    return "wait until it ends, or, if you know it is dead, add --force --apply"
