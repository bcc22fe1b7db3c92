import contextlib
import json
import os
import resource

import pytest

from bigscl.common.files import (
    append_lines,
    atomic_write,
    explain,
    read_json_lines,
    read_json_object,
    write_text,
)


@contextlib.contextmanager
def small_files():
    """No file may grow beyond 100 bytes, as on a full disk. Not a fixture: pytest may write to a file."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))


def test_a_failed_write_leaves_the_old_file_and_names_it(tmp_path):
    path = tmp_path / "config.yaml"
    write_text(path, "old")
    with small_files(), pytest.raises(OSError, match=r"config\.yaml") as caught:
        write_text(path, "new" * 100)
    assert path.read_text() == "old"
    assert [each.name for each in tmp_path.iterdir()] == ["config.yaml"]
    assert explain(caught.value).startswith(f"{path}: could not be written: File too large. Free some space")


def test_a_failed_append_names_the_file(tmp_path):
    with small_files(), pytest.raises(OSError, match=r"metrics\.jsonl") as caught:
        append_lines(tmp_path / "metrics.jsonl", ["x" * 200])
    assert "Free some space" in explain(caught.value)


def test_a_file_gets_its_name_only_when_the_block_ends_well(tmp_path):
    def draw():
        with atomic_write(tmp_path / "picture.png") as partial:
            partial.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        draw()
    assert not list(tmp_path.iterdir())


def test_an_error_names_the_file_that_could_not_be_read_or_the_one_that_is_written(tmp_path):
    def copy(source):
        with atomic_write(tmp_path / "shard.tar") as partial:
            partial.write_bytes(source.read_bytes())

    with pytest.raises(FileNotFoundError) as caught:
        copy(tmp_path / "image.jpg")
    assert caught.value.filename == str(tmp_path / "image.jpg")
    (tmp_path / ".shard.tar.partial").mkdir()
    (tmp_path / "image.jpg").touch()
    with pytest.raises(OSError, match="shard") as caught:
        copy(tmp_path / "image.jpg")
    assert caught.value.filename == str(tmp_path / "shard.tar")


def test_new_files_have_the_mode_that_the_user_asks_for(tmp_path):
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "file", "text")
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize("torn", [b'{"step": 3, "lo', b"\0" * 50, b"\xff\xfe", b"[1]", b"[" * 100_000])
def test_lines_after_a_torn_one_are_read(tmp_path, torn, caplog):
    path = tmp_path / "metrics.jsonl"
    append_lines(path, ['{"step": 1}', '{"step": 2}'])
    with path.open("ab") as file:
        file.write(torn)
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}]
    assert "skipped 1 lines" in caplog.text
    append_lines(path, ['{"step": 3}'])
    assert read_json_lines(path) == [{"step": 1}, {"step": 2}, {"step": 3}]


def test_files_without_an_object_read_as_nothing(tmp_path):
    assert read_json_lines(tmp_path / "missing.jsonl") == []
    for content in (b"", b"\0\0", b"[1]", b'{"id"', b"\xff"):
        (tmp_path / "run.json").write_bytes(content)
        assert read_json_object(tmp_path / "run.json") is None
    (tmp_path / "run.json").write_text(json.dumps({"id": "a"}))
    assert read_json_object(tmp_path / "run.json") == {"id": "a"}


def test_only_errors_of_the_outside_world_are_explained():
    assert explain(OSError(28, "No space left on device", "x")).startswith("x: could not be written")
    assert explain(PermissionError(13, "Permission denied", "x")).startswith("x: Permission denied. Check")
    assert explain(FileNotFoundError("weights: no file x")) == "weights: no file x"
    assert explain(OSError(9, "Bad file descriptor")) is None
    assert explain(ConnectionResetError("peer")) is None
