"""The outputs in docs/commands.md, made from a finished quickstart.

    bigscl quickstart && python -m tests.tools_readme quickstart    # write them again
    python -m tests.tools_readme quickstart --check                 # exit code 1 and a diff if they differ

The commands after a line MARK are executed; all others need data or machines that are not here. Nothing is
written to the quickstart. Progress lines and what stderr says are left out. An output that differs from the
page only in times, speeds and free space stays as it is.
"""

import argparse
import contextlib
import difflib
import re
import shlex
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "commands.md"
MARK = "<!-- outputs by python -m tests.tools_readme -->"
BLOCK = re.compile(rf"(?P<mark>{re.escape(MARK)}\n)?```\n(?P<body>.*?)```\n", re.DOTALL)
CHANGING = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d|[\d.]+ [KMGT]?B/s|[\d.]+ [KMGT]B free")
"""What is different each time: moments, speeds, free space."""


@dataclass(frozen=True, slots=True)
class Example:
    """A command of the page, what the page says that it prints, and the empty lines after that."""

    command: str
    output: str
    gap: str

    @property
    def text(self) -> str:
        return f"$ {self.command}\n{self.output}{self.gap}"


def examples(body: str) -> list[Example]:
    """The examples in a fenced block."""
    found = []
    for part in re.split(r"^\$ ", body, flags=re.MULTILINE)[1:]:
        command, _, rest = part.partition("\n")
        output = f"{rest.strip(chr(10))}\n" if rest.strip() else ""
        found.append(Example(command, output, rest[len(output) :]))
    return found


def commands(page: str, marked_only: bool = False) -> list[str]:
    """The commands that the page shows."""
    blocks = [block for block in BLOCK.finditer(page) if block["mark"] or not marked_only]
    return [example.command for block in blocks for example in examples(block["body"])]


def renewed(page: str, execute: Callable[[list[str]], str]) -> str:
    """The page with what its marked commands print now."""

    def renewed_block(block: re.Match[str]) -> str:
        if not block["mark"]:
            return block[0]
        new = "".join(renewed_example(example, execute).text for example in examples(block["body"]))
        return f"{block['mark']}```\n{new}```\n"

    return BLOCK.sub(renewed_block, page)


def renewed_example(example: Example, execute: Callable[[list[str]], str]) -> Example:
    output = execute(shlex.split(example.command))
    if CHANGING.sub("", output) == CHANGING.sub("", example.output):
        return example
    return Example(example.command, output, example.gap)


@contextlib.contextmanager
def workplace(quickstart: Path) -> Iterator[Path]:
    """A temporary folder in which the page's paths exist, so that its commands write nothing elsewhere."""
    with tempfile.TemporaryDirectory() as place:
        for name in {Path("quickstart"), name_in_configs(quickstart)}:
            (Path(place) / name).parent.mkdir(parents=True, exist_ok=True)
            (Path(place) / name).symlink_to(quickstart.resolve())
        (Path(place) / "configs").symlink_to(ROOT / "configs")
        yield Path(place)


def name_in_configs(quickstart: Path) -> Path:
    """The path under which the quickstart was made: the configs of its runs name their shards with it."""
    run = Path(yaml.safe_load((quickstart / "scl" / "config.yaml").read_text())["run"])
    if ".." in run.parts:
        raise SystemExit(f"{quickstart}: was made as {run.parent}, expected a path without '..'")
    return Path("quickstart") if run.is_absolute() else run.parent


def executed(words: list[str], place: Path) -> str:
    """What a command prints, without the paths and the name of this machine."""
    call = [sys.executable, "-m", "bigscl", *words[1:]] if words[0] == "bigscl" else words
    done = subprocess.run(call, cwd=place, capture_output=True, text=True, check=False)
    if not went_well(words, done.returncode):
        raise SystemExit(f"$ {shlex.join(words)}\nended with exit code {done.returncode}: {done.stderr}")
    return portable(done.stdout, place)


def went_well(words: list[str], code: int) -> bool:
    """Whether a command ended as it should: `diff` exits with 1 where two stores differ."""
    return code == 0 or (words[:2] == ["bigscl", "diff"] and code == 1)


def portable(output: str, place: Path) -> str:
    for folder in (place, place.resolve(), ROOT):
        output = output.replace(f"{folder}/", "")
    return re.sub(rf"\b{re.escape(socket.gethostname())}\b", "node1", output)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("quickstart", type=Path)
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("--page", type=Path, default=PAGE, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not (options.quickstart / "results.json").exists():
        parser.error(f"{options.quickstart}: is not the folder of a finished `bigscl quickstart`")
    before = options.page.read_text()
    with workplace(options.quickstart) as place:
        after = renewed(before, lambda words: executed(words, place))
    if not options.check:
        options.page.write_text(after)
        return 0
    name = str(options.page)
    sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), after.splitlines(True), name, "now"))
    return int(after != before)


if __name__ == "__main__":
    sys.exit(main())
