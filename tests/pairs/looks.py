"""What is looked at when a row was trained, in a process that reaches its servers."""

import json
from collections.abc import Iterator
from pathlib import Path

from bigscl.config import load_config
from bigscl.store import Rows
from bigscl.training.run_folder import open_data, read_store
from tests.integration.runs import assert_same_rows, assert_same_weights, losses_of, score_files, weights_of


def compare(run: str, twin: str) -> None:
    """Check that both have the same weights, losses, rows and kept scores, to the last bit."""
    one, other = Path(run), Path(twin)
    assert_same_weights(weights_of(one), weights_of(other))
    assert losses_of(one) == losses_of(other)
    assert score_files(one) == score_files(other)
    if load_config(one / "config.yaml").store.kind == "disk":
        (rows, attributes), (rows_of_twin, attributes_of_twin) = read_memory(one), read_memory(other)
        assert attributes == attributes_of_twin
        assert_same_rows(rows, rows_of_twin)


def read_memory(run: Path) -> tuple[Rows, dict[str, object]]:
    """Return all rows of a run's store, and what its snapshot says."""
    config = load_config(run / "config.yaml")
    data = open_data(config)
    store = read_store(config, data.annotations)
    return store.read(data.train.ids()), dict(store.snapshot.attributes)


def copy_store(source: str, target: str) -> None:
    """Copy all objects of a store."""
    import obstore

    from bigscl.store.backends.schemes import Location

    one, other = (Location.parse(url).client(Location.parse(url).path) for url in (source, target))
    for page in obstore.list(one):
        for found in page:
            obstore.put(other, found["path"], obstore.get(one, found["path"]).bytes())


def use_tools(run: str, folder: str) -> None:
    """Print {name: (exit code, output)} of each tool, as JSON."""
    from tests.test_tools.conftest import bigscl

    Path(folder).mkdir()
    key = open_data(load_config(Path(run) / "config.yaml")).train.key(0)
    ended = {}
    for name, words in calls(Path(run), Path(folder), key):
        done = bigscl(*words)
        ended[name] = done.code, done.out[-2000:] + done.err[-4000:]
    ended["view"] = open_page(run)
    print(json.dumps(ended))


def calls(run: Path, folder: Path, key: str) -> Iterator[tuple[str, list[object]]]:
    """Yield (name, words) of each call of a tool, those that change the store last."""
    # The row with little RAM would be warned of, and rightly so.
    yield "plan", ["plan", run / "config.yaml", "--store.resident_gb", "null"]
    yield "show", ["show", run]
    yield "show sample", ["show", run, "--sample", key]
    yield "verify", ["verify", run, "--all"]
    yield "export labels", ["export", run, "labels", "--which", "all", "-o", folder / "labels.csv"]
    yield "export scores", ["export", run, "scores", "-o", folder / "scores.npz"]
    yield "export heatmaps", ["export", run, "heatmaps", "--sample", key, "-o", folder / "heatmaps.npz"]
    yield "audit", ["review", "list", run, "-o", folder / "audit.csv"]
    yield "ask", ["review", "ask", run, "--list", "--count", 3]
    yield "ask simulated", ["review", "ask", run, "--simulate", 3, "--answers", folder / "answers.jsonl"]
    yield "render", ["render", run, "--count", 1, "-o", folder / "samples.png"]
    yield "view prepared", ["view", run, "--prepare"]
    yield "compact", ["compact", run, "--apply"]
    yield "compact rewritten", ["compact", run, "--top", 4, "--slots", 2, "--apply"]
    yield "verify again", ["verify", run, "--all"]


def open_page(run: str) -> tuple[int, str]:
    """Ask the page everything; return (0, nothing), or (2, why the run cannot be shown)."""
    from bigscl.common.user_error import UserError
    from tests.test_tools.view_site import serving

    try:
        with serving(run) as site:
            for path in ("/", *(f"{address}?row=0&class=0" for address in site.api.get)):
                answer = site.ask(path)
                asks_for_nothing = answer.status == 400 and b"nothing is to be asked" in answer.body
                assert answer.status == 200 or asks_for_nothing, (
                    f"{path}: {answer.status} {answer.body[:500]!r}"
                )
    except UserError as error:
        return 2, str(error)
    return 0, ""
