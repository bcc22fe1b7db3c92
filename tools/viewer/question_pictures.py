"""Images of questions in a terminal: on a page that is served, else a file that follows the questions."""

import json
import os
import socket
import sys
import webbrowser
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.parse import urlencode

import numpy as np

from bigscl.common.files import read_json_object
from bigscl.data.open_tar import Unreadable
from bigscl.data.read_samples import read_images
from bigscl.evaluation.plots.sample_plots import SamplePicture, draw_samples, kinds_of, panel_of
from bigscl.store import HeatmapStore, process_start
from bigscl.tools.shared.open_store import Data
from bigscl.tools.shared.questions import Question

PAGE = "page.json"
FOLLOWING = '<meta http-equiv="refresh" content="1"><body style="background:#222"><img src="question.png">'
"""A page that shows the newest picture."""


@contextmanager
def announced(folders: Sequence[Path], address: str) -> Iterator[None]:
    """Keep the address of a page, while it is served, in the folder of the indexes of each of its runs.

    Only this user can read it: it has the token.
    """
    files = [folder / PAGE for folder in folders]
    facts = {"host": socket.gethostname(), "pid": os.getpid(), "started": process_start(os.getpid())}
    for number, file in enumerate(files):
        with suppress(OSError):  # a place that cannot be written: the address was printed
            file.parent.mkdir(parents=True, exist_ok=True)
            file.unlink(missing_ok=True)
            with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
                json.dump({**facts, "address": f"{address}&{urlencode({'run': number})}"}, opened)
    try:
        yield
    finally:
        for file in files:
            with suppress(OSError):
                if (read_json_object(file) or {}).get("pid") == os.getpid():
                    file.unlink()


def _page(folder: Path) -> str | None:
    """Return the address of the page that a process of this machine serves; None if there is none."""
    try:
        facts = read_json_object(folder / PAGE) or {}
        is_served = facts["host"] == socket.gethostname() and process_start(facts["pid"]) == facts["started"]
        return str(facts["address"]) if is_served else None
    except (OSError, KeyError, TypeError):
        return None


def has_display() -> bool:
    """Return whether somebody is at a terminal of a machine that can open windows."""
    windows = (
        sys.platform in ("darwin", "win32") or "DISPLAY" in os.environ or "WAYLAND_DISPLAY" in os.environ
    )
    return windows and sys.stdout.isatty()


class QuestionPictures:
    """Shows the image of each question with the heat of its class."""

    def __init__(
        self, store: HeatmapStore, data: Data, page_folder: Path, folder: Path, *, opens: bool
    ) -> None:
        """`page_folder` is that of the indexes of the run, `folder` one for the picture."""
        self._store, self._data, self._opens = store, data, opens
        self._page_folder, self._folder = page_folder, folder
        self._follows = False

    def show(self, question: Question) -> str:
        """Return the address or the file that shows the image, opened in a browser if that is wanted."""
        page = _page(self._page_folder)
        if page is not None:
            shown = (
                f"{page}&{urlencode({'page': 'sample', 'row': question.sample, 'focus': question.number})}"
            )
            if self._opens:
                webbrowser.open(shown)
            return shown
        file = self._folder / "question.png"
        try:
            draw_samples([self._picture(question)], file)
        except Unreadable as error:
            return f"no image: {error}"
        if self._opens and not self._follows:
            following = file.with_suffix(".html")
            following.write_text(FOLLOWING)
            webbrowser.open(following.absolute().as_uri())
            self._follows = True
        return str(file)

    def _picture(self, question: Question) -> SamplePicture:
        ids, names = np.array([question.sample]), self._data.index.class_names
        image = read_images(self._data.index, ids)[question.sample].numpy()
        rows = self._store.read_without_initial_value(ids)
        kinds = kinds_of(self._data.annotated(ids)[0])
        panels = [] if rows.heatmaps is None else [panel_of(rows, question.number, names, kinds)]
        return SamplePicture(image=image, title=question.key, panels=panels)
