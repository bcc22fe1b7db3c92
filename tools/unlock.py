"""`bigscl unlock`: free a store from a run that died holding it."""

import json
from dataclasses import asdict
from typing import Annotated

import typer

from store.backends import open_backend
from store.lease import PATIENCE_SECONDS, break_lease, is_dead, read_holder
from store.opening import read_spec
from tools.opening import Anonymous, Apply, AsJson, Endpoint, Region, Store, locate, options


def command(
    store: Store,
    force: Annotated[
        bool, typer.Option("--force", help="Also from a holder that may be alive: it will fail to commit.")
    ] = False,
    apply: Apply = False,
    patience: Annotated[
        float,
        typer.Option(
            min=0, max=86_400, help="Seconds without a sign of life after which another host is dead."
        ),
    ] = PATIENCE_SECONDS,
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
    holder = read_holder(backend)
    dead = holder is not None and is_dead(backend, holder, patience)
    may = holder is not None and (dead or force)
    broken = may and apply and break_lease(backend, holder) is not None
    if as_json:
        held = None if holder is None else asdict(holder)
        print(json.dumps({"url": backend.url, "holder": held, "dead": dead, "broken": broken}))
    elif holder is None:
        print(f"{backend.url}: nobody holds it")
    else:
        state = "which is dead" if dead else "which may be alive"
        done = "its lease is broken" if broken else _advice(may)
        print(f"{backend.url}: held by {holder}, {state}; {done}")
    if holder is not None and not may:
        raise typer.Exit(1)


def _advice(may: bool) -> str:
    if may:
        return "add --apply to break its lease"
    return "wait until it ends, or, if you know it is dead, add --force --apply"
