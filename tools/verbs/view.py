"""Look at runs in the browser, while they train or after."""

import os
import secrets
import signal
import threading
from pathlib import Path
from typing import Annotated

import typer

from bigscl.common.user_error import UserError
from bigscl.tools.shared.open_store import DataFlags, StorageFlags
from bigscl.tools.viewer.api import Api
from bigscl.tools.viewer.open_run import OpenRun, Places
from bigscl.tools.viewer.pictures import announced
from bigscl.tools.viewer.server import Server

SECONDS_BETWEEN_LOOKS = 5.0
NICENESS = 10


def command(
    runs: Annotated[
        list[str],
        typer.Argument(metavar="RUN...", help="Folders of runs, or stores; RUN@ID is snapshot ID of it."),
    ],
    host: Annotated[
        str, typer.Option(help="Address to listen at. With others than 127.0.0.1 all needs the token.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port to listen at; 0 takes a free one.")
    ] = 8765,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="Folder for the indexes of scores of one run. Default: `view` in the folder of the run, or "
            "~/.cache/bigscl/view if that cannot be written."
        ),
    ] = None,
    prepare: Annotated[
        bool, typer.Option("--prepare", help="Make the indexes and exit, without a page.")
    ] = False,
    *,
    source: DataFlags,
    storage: StorageFlags,
) -> None:
    """Show samples with their heatmaps, classes and curves of runs in the browser, while they train or after.

    Only this machine can connect, unless --host says otherwise; the store is only read.

    Example: bigscl view runs/quickstart
    """
    if cache is not None and len(runs) > 1:
        raise UserError(f"--cache {cache}: is for one run, here are {len(runs)}")
    places = Places(source=source, storage=storage, cache=cache)
    opened = [OpenRun(run, places) for run in runs]
    if prepare:
        for run in opened:
            run.update(now=True)
        print("\n".join(f"{run.name}: snapshot {run.store.snapshot.id} is indexed" for run in opened))
        return
    _serve(opened, host, port)


def _serve(runs: list[OpenRun], host: str, port: int) -> None:
    api = Api(runs)
    try:
        token = secrets.token_urlsafe(24)
        server = Server(
            host, port, token, dict.fromkeys(api.get, api.answer), dict.fromkeys(api.post, api.write)
        )
    except (OSError, UnicodeError, ValueError) as error:
        raise UserError(f"--host {host} --port {port}: cannot listen there: {error}") from error
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # A training on this machine comes first.
    os.nice(NICENESS)
    ended = threading.Event()
    threading.Thread(target=_follow, args=(runs, ended), daemon=True, name="view-follow").start()
    print(f"open {server.address}\nCtrl-C ends it", flush=True)
    try:
        with announced([run.cache for run in runs], server.address):
            server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        ended.set()
        server.server_close()


def _follow(runs: list[OpenRun], ended: threading.Event) -> None:
    while True:
        for run in runs:
            run.follow()
        if ended.wait(SECONDS_BETWEEN_LOOKS):
            return
