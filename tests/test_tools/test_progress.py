"""Progress: a bar where someone watches, sparse lines where not."""

import os
import pty
import subprocess
import sys

import pytest

from bigscl.tools.shared import terminal as progress

WORK = (
    "from bigscl.tools.shared.terminal import progress\n"
    "with progress('writing', 3, 'shards') as advance:\n"
    "    for name in 'abc':\n"
    "        advance(1, f'shard {name}')\n"
)


@pytest.mark.parametrize(("seconds", "lines"), [(0.0, "abcde"), (1000.0, "ae")])
def test_lines_come_first_last_and_not_too_often_in_between(capsys, monkeypatch, seconds, lines):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", seconds)
    with progress.progress("scanning", 50, "samples") as advance:
        for name in "abcde":
            advance(10, name)
    expected = {name: f"scanning: {10 * i} of 50 samples, {name}" for i, name in enumerate("abcde", 1)}
    assert capsys.readouterr().err.splitlines() == [expected[name] for name in lines]


def test_a_terminal_gets_a_bar_and_a_file_gets_lines():
    piped = subprocess.run([sys.executable, "-c", WORK], check=True, capture_output=True, text=True)
    assert piped.stdout == ""
    assert piped.stderr.splitlines() == ["writing: 1 of 3 shards, shard a", "writing: 3 of 3 shards, shard c"]
    main, terminal = pty.openpty()
    subprocess.run(
        [sys.executable, "-c", WORK], check=True, stderr=terminal, env={**os.environ, "TERM": "xterm"}
    )
    os.close(terminal)
    shown = os.read(main, 100_000).decode()
    os.close(main)
    assert "━" in shown
    assert "3/3" in shown
    assert "shards, shard c" in shown
