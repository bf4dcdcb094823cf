"""Read files that other programs may have changed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from trainbox.files.regular_files import append_line, append_regular, read_object, read_text


def test_an_object_is_read_also_through_a_link(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"ä": 1}')
    (tmp_path / "b.json").symlink_to("a.json")
    assert read_object(tmp_path / "b.json") == {"ä": 1}


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (os.mkfifo, "not a regular file"),
        (Path.mkdir, "not a regular file"),
        (lambda path: path.symlink_to(path.name), "symbolic links"),
        (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
        (lambda path: path.write_bytes(b'{"a": "\xff"}'), "can't decode byte 0xff"),
        (lambda path: path.write_text("[]"), "not a JSON object"),
        (lambda path: None, "No such file"),
    ],
)
def test_other_content_and_other_files_are_errors_with_a_reason(
    tmp_path: Path, make: Callable[[Path], object], reason: str
) -> None:
    make(tmp_path / "a.json")
    with pytest.raises((OSError, ValueError), match=reason):
        read_object(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("link", "reason"),
    [
        (Path.symlink_to, "symbolic links"),
        (lambda path, other: path.symlink_to("missing"), "symbolic links"),
    ],
)
def test_nothing_is_written_through_a_link(
    tmp_path: Path, link: Callable[[Path, Path], object], reason: str
) -> None:
    other = tmp_path / "other"
    other.write_text("precious")
    link(tmp_path / "log", other)
    for write in (append_regular, lambda path: append_line(path, "a")):
        with pytest.raises(OSError, match=reason):
            write(tmp_path / "log")
    assert other.read_text() == "precious"
    assert not (tmp_path / "missing").exists()


def test_a_file_is_read_up_to_a_size(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("12345")
    assert read_text(tmp_path / "a", 5) == "12345"
    with pytest.raises(ValueError, match="more than 4 bytes"):
        read_text(tmp_path / "a", 4)


def test_a_line_after_a_full_disk_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path, write = tmp_path / "metrics.jsonl", os.write

    def half(descriptor: int, data: bytes) -> int:
        monkeypatch.undo()
        return write(descriptor, data[: len(data) // 2])

    monkeypatch.setattr(os, "write", half)
    with pytest.raises(OSError, match="No space left on device"):
        append_line(path, '{"step": 1}')
    append_line(path, '{"step": 2}')
    assert path.read_text() == '{"step\n{"step": 2}\n'


def test_a_process_that_was_forked_during_an_append_keeps_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader worker can be forked while a thread appends, and lives long."""
    write, children = os.write, list[int]()

    def forking(descriptor: int, data: bytes) -> int:
        if (pid := os.fork()) == 0:
            signal.pause()
        children.append(pid)
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", forking)
    append_line(tmp_path / "a", "1")
    monkeypatch.undo()
    try:
        append_line(tmp_path / "a", "2")
    finally:
        os.kill(children[0], signal.SIGKILL)
        os.waitpid(children[0], 0)
    assert (tmp_path / "a").read_text() == "1\n2\n"
