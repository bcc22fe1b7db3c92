"""What people see while a run trains: its step, the time left, the waits, and the work between epochs."""

import io
import logging
import time

import pytest
from rich.console import Console

from bigscl.training import metrics_log
from bigscl.training.metrics_log import EpochBar, EpochTimer, clock, describe, working

VALUES = {
    "loss": 0.12345,
    "images_per_second": 12345.6,
    "wait_data": 0.03,
    "wait_heatmaps": 0.114,
    "wait_writeback": 0.12,
    "wait_ranks": 0.0,
}


@pytest.fixture
def now(monkeypatch):
    """A clock that stands still until it is set."""
    seconds = [0.0]
    monkeypatch.setattr(metrics_log.time, "perf_counter", lambda: seconds[0])
    return seconds


def test_line_says_step_time_left_and_every_wait(now):
    pace = EpochTimer(epoch=1, epochs=4, total=500, done=100)
    pace.done, now[0] = 120, 40.0
    assert describe(pace, VALUES) == (
        "epoch 2/4 step 120/500: loss 0.1235, 12346 images/s, epoch ends in 12:40, run in 46:00, "
        "waits: data 3% heatmaps 11% writeback 12% ranks 0%"
    )


def test_time_left_of_the_run_counts_the_ends_of_epochs(now):
    """Two epochs of 10 seconds are left, and this one's half; each ends with 7 seconds of other work."""
    pace = EpochTimer(epoch=1, epochs=4, total=10, done=0, between_seconds=7.0)
    pace.done, now[0] = 5, 5.0
    assert pace.seconds_left() == (5.0, 5.0 + 2 * 10.0 + 3 * 7.0)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (3599, "59:59"), (86399, "23:59:59"), (180061, "2d02h")],
)
def test_clock(seconds, text):
    assert clock(seconds) == text


def test_bar_of_a_large_run_shows_the_waits_in_100_columns(now):
    """The widest that a line gets: no value is cut off."""
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=True, color_system=None)
    pace = EpochTimer(epoch=98, epochs=100, total=10010, done=0)
    bar = EpochBar(pace, 98, 100, console)
    pace.done, now[0] = 1001, 4500.0
    bar.advance()
    bar.show(VALUES)
    console.print(bar.progress.get_renderable())
    (line,) = file.getvalue().splitlines()
    assert len(line) <= 100
    assert "epoch 99/100" in line
    assert "1001/10010" in line
    assert line.rstrip().endswith("left 11:15:00/23:45:00 loss 0.1235 12346/s writeback 12% heatmaps 11%")


def test_long_work_without_a_terminal_tells_how_far_it_is(monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(metrics_log, "SECONDS_BETWEEN_LINES", 0.01)
    with working("counting", 3, None) as show:
        show(2)
        while not any("2 of 3" in message for message in caplog.messages):
            time.sleep(0.001)
    assert caplog.messages[0] == "counting"
    assert "counting: 2 of 3, 0:00 so far" in caplog.messages
    assert caplog.messages[-1] == "counting: done in 0:00"


def test_short_work_is_one_line_and_an_error_ends_its_thread(caplog):
    caplog.set_level(logging.INFO)
    with working("deleting", None, None):
        pass
    with pytest.raises(ValueError, match="no"), working("deleting", None, None):
        raise ValueError("no")
    assert caplog.messages == ["deleting", "deleting"]


def test_work_on_a_terminal_is_a_bar(caplog):
    file = io.StringIO()
    with working("counting", 3, Console(file=file, width=100, force_terminal=True)) as show:
        show(3)
    assert "3/3" in file.getvalue()
