"""Break the lease of a dead run."""

from dataclasses import asdict, dataclass
from typing import Annotated

import typer

from bigscl.common.command_line import AsJson
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
from bigscl.tools.shared.open_store import Apply, StorageFlags, Store, locate
from bigscl.tools.shared.terminal import print_result


def command(
    store: Store,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Also break a damaged lease, or that of a run that may be alive (it will fail to commit).",
        ),
    ] = False,
    apply: Apply = False,
    patience: Annotated[
        float,
        typer.Option(
            min=0, max=86_400, help="Seconds without a heartbeat after which another host counts as dead."
        ),
    ] = LEASE_PATIENCE_SECONDS,
    *,
    storage: StorageFlags,
    as_json: AsJson = False,
) -> None:
    """Show which run uses a store and whether it is dead; with --apply, break the lease of a dead run.

    A run takes over the lease of a dead run by itself: this is to look, and for cases of doubt.

    Example: bigscl unlock runs/quickstart/store --apply
    """
    backend = open_backend(locate(store), storage.options)
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
    print_result(facts, _text(backend.url, lease, may, broken), as_json)
    if lease.exists and not may:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    holder: Holder | None = None
    damage: str | None = None
    """Why it cannot be read; then the holder is unknown."""
    dead: bool = False

    @property
    def exists(self) -> bool:
        return self.holder is not None or self.damage is not None


def _examine(backend: Backend, patience_seconds: float) -> State:
    try:
        holder = read_holder(backend)
    except BadFile as error:
        return State(damage=str(error))
    return State(holder=holder, dead=holder is not None and is_dead(backend, holder, patience_seconds))


def _text(url: str, lease: State, may: bool, broken: bool) -> str:
    sure = "wait until it ends, or, if you know it is dead, add --force --apply"
    done = "its lease is broken" if broken else "add --apply to break its lease" if may else sure
    if lease.damage is not None:
        return f"{lease.damage} The holder of the store is unknown; {done}"
    if lease.holder is None:
        return f"{url}: no run uses it"
    state = "which is dead" if lease.dead else "which may be alive"
    return f"{url}: held by {lease.holder}, {state}; {done}"
