"""Every pair of settings that can meet, in runs that are killed, resumed and looked at."""

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from bigscl.config import ConfigError, make_config
from tests.builders import make_once
from tests.pairs.places import Places, fill, serve
from tests.pairs.rows import Row, all_pairs, pairs_of, refusal_of, rows
from tests.pairs.table import DIMENSIONS, LEFT_OUT, REFUSALS, all_settings, choices_of
from tests.pairs.trial import Trial, is_one_line

pytestmark = pytest.mark.timeout(1800)
DEFAULTS = {name: next(iter(values)) for name, values in DIMENSIONS.items()}
NUM_QUICK = 3
QUICK = {"launcher": ("python",), "compile": ("false",), "precision": ("fp32",), "store": ("disk", "s3")}
"""Of rows that take little time."""


def quick_rows() -> list[int]:
    """Return the numbers of a few rows that take little time, with as many other values than defaults."""

    def num_others(number: int) -> int:
        return sum(value != DEFAULTS[name] for name, value in rows()[number].items())

    found = [
        number
        for number, row in enumerate(rows())
        if row["tars"] == "folder" and all(row[name] in values for name, values in QUICK.items())
    ]
    return sorted(found, key=num_others, reverse=True)[:NUM_QUICK]


QUICK_ROWS = quick_rows()
OTHER_ROWS = [number for number in range(len(rows())) if number not in QUICK_ROWS]


@pytest.fixture(scope="session")
def places(tmp_path_factory):
    shards = make_once(tmp_path_factory, "pairs", fill)
    with serve(shards, tmp_path_factory.mktemp("servers")) as found:
        yield found


def test_every_choice_of_the_config_is_in_the_table():
    kinds = {path: choices_of(kind) for path, kind, _ in all_settings()}
    tried: dict[str, list[object]] = {}
    for values in DIMENSIONS.values():
        for settings in values.values():
            for path, value in settings.items():
                tried.setdefault(path, []).append(value)
    left_out = {path for path, choices in kinds.items() if not set(choices) <= set(tried.get(path, []))}
    assert left_out == LEFT_OUT.keys()


def test_rows_cover_every_pair_and_none_is_refused():
    assert set(all_pairs()) <= {pair for row in rows() for pair in pairs_of(row)}
    assert [row for row in rows() if refusal_of(row) is not None] == []


def refused_rows() -> list[Row]:
    """Every refused value, pair or triple of values, with defaults elsewhere."""
    found = [DEFAULTS | {name: value} for name, values in DIMENSIONS.items() for value in values]
    for one, other in combinations(DIMENSIONS, 2):
        found += [
            DEFAULTS | {one: first, other: second}
            for first in DIMENSIONS[one]
            for second in DIMENSIONS[other]
        ]
    return [row for row in found if refusal_of(row) is not None]


def test_what_the_table_refuses_is_refused_with_all_reasons(tmp_path, places):
    at_the_start: dict[tuple[str, ...], Trial] = {}
    for row in refused_rows():
        reasons = [refusal.says for refusal in REFUSALS if refusal.forbids(row)]
        trial = Trial(row, tmp_path, places)
        found = mistakes_in(trial.values("run", later=True))
        if found:
            unsaid = {says for says in reasons if not is_one_line(found, says)}
            assert unsaid <= set(KNOWN_AT_THE_START), f"{row}: {found}"
        elif can_be_tried(row, places):
            at_the_start.setdefault(tuple(reasons), trial)
    assert {says for reasons in at_the_start for says in reasons} == set(KNOWN_AT_THE_START)
    for reasons, trial in at_the_start.items():
        code, output = trial.start("bigscl.train", trial.config("run", later=True))
        assert code == 2, output
        assert any(is_one_line(output, says) for says in reasons), output
        assert not (tmp_path / "run").exists(), output


def can_be_tried(row, places: Places) -> bool:
    """Return whether the servers that a row needs are there."""
    return "az" not in (row["store"], row["tars"]) or not places.missing


def mistakes_in(values: dict[str, Any]) -> str:
    try:
        make_config(values)
    except ConfigError as error:
        return str(error)
    return ""


KNOWN_AT_THE_START = [
    refusal.says
    for refusal in REFUSALS
    if refusal.dimensions
    in (
        ("precision",),
        ("fused",),
        ("processes", "SyncBatchNorm"),
        ("launcher", "SyncBatchNorm"),
        ("K per class", "validation"),
    )
]
"""What a config alone does not show: it depends on the machine and on the labels."""


@pytest.mark.parametrize("number", QUICK_ROWS)
def test_a_quick_row(tmp_path, places, number):
    try_row(tmp_path, places, number)


@pytest.mark.slow
@pytest.mark.parametrize("number", OTHER_ROWS)
def test_a_row(tmp_path, places, number):
    try_row(tmp_path, places, number)


def try_row(folder: Path, places: Places, number: int) -> None:
    row = rows()[number]
    print(row)
    if not can_be_tried(row, places):
        pytest.skip(places.missing)
    Trial(row, folder, places).run()
