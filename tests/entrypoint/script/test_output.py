"""The output of the ranks: logs of bounded size, whole lines, prefixes and reports."""

import io
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from entrypoint.script.output import Log, Pipes, Stream, reported
from tests.support.commands import clean_environment, wait_until
from tests.support.paths import ROOT
from trainbox.errors import StorageFailure
from trainbox.processes import streams
from trainbox.processes.programs import ENTRYPOINT, command_of
from trainbox.processes.streams import write_all


class Gone(io.BytesIO):
    def write(self, _data: Any) -> int:
        raise BrokenPipeError


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    log = Log(tmp_path / "rank-0.log")
    yield log
    log.close()


def stream(log: Log, **options: Any) -> tuple[Stream, io.BytesIO, list[dict[str, Any]]]:
    shown, entries = io.BytesIO(), list[dict[str, Any]]()
    return Stream(log, shown.write, report=entries.append, **options), shown, entries


def test_lines_and_reports_may_arrive_in_parts_and_without_a_line_end(log: Log) -> None:
    one, shown, entries = stream(log, prefix=b"[1] ")
    for part in (b'text\n{"step": ', b'3, "loss": 0.5}', b'\n\n{"step": 4}'):
        one.take(part)
    assert shown.getvalue() == b'[1] text\n[1] {"step": 3, "loss": 0.5}\n[1] \n'
    assert entries == [{"step": 3, "loss": 0.5}]
    one.close()
    assert shown.getvalue().endswith(b'\n[1] {"step": 4}\n')
    assert entries[1:] == [{"step": 4}]
    assert log.path.read_bytes() == b'text\n{"step": 3, "loss": 0.5}\n\n{"step": 4}'


def test_a_progress_bar_moves_at_once(log: Log) -> None:
    one, shown, _ = stream(log, whole_lines=False)
    one.take(b"\r10%")
    assert shown.getvalue() == b"\r10%"
    one.close()
    assert shown.getvalue() == b"\r10%"


def test_a_reader_that_has_gone_does_not_stop_the_log(log: Log) -> None:
    one = Stream(log, Gone().write)
    one.take(b"first\n")
    one.take(b"second\n")
    assert log.path.read_bytes() == b"first\nsecond\n"


def test_the_end_of_a_line_that_is_too_long_is_not_a_report(log: Log) -> None:
    one, _, entries = stream(log)
    one.take(b"x" * 200_000)
    one.take(b'{"step": 1}\n{"step": 2}\n')
    assert entries == [{"step": 2}]


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"[1]",
        b'{"loss": 1}',
        b'{"step": 1.5}',
        b'{"step": true}',
        b'{"step": "1"}',
        b"\xff{}",
        b"{" * 100_000,
        b'{"step": 1, "text": "' + b"x" * 100_000 + b'"}',
    ],
)
def test_other_lines_are_not_reports(line: bytes) -> None:
    assert reported(line) is None


def test_a_log_keeps_its_newest_bytes(tmp_path: Path) -> None:
    log = Log(tmp_path / "rank-0.log", limit=1000)
    for number in range(1000):
        log.write(f"{number:09}\n".encode())
    log.close()
    assert sorted(file.name for file in tmp_path.iterdir()) == ["rank-0.1.log", "rank-0.log"]
    kept = (tmp_path / "rank-0.1.log").read_bytes() + (tmp_path / "rank-0.log").read_bytes()
    assert len(kept) <= 2000
    assert kept.endswith(b"000000998\n000000999\n")


def test_a_log_that_cannot_be_written_is_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = Log(tmp_path / "rank-0.log", limit=10)
    (tmp_path / "rank-0.1.log").mkdir()
    (tmp_path / "rank-0.1.log/file").touch()
    for _ in range(3):
        log.write(b"123456789\n")
    log.close()
    assert capsys.readouterr().err == (
        f"trainbox: {tmp_path}/rank-0.log cannot be written (Is a directory): it is not complete\n"
    )


def test_the_last_line_that_a_full_disk_cuts_is_lost(
    log: Log, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The kernel writes what fits, and only the next write fails."""
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:2]))
    log.write(b"1234")
    monkeypatch.undo()
    log.write(b"5678")
    assert log.path.read_bytes() == b"12"
    assert "(No space left on device): it is not complete\n" in capsys.readouterr().err


def test_a_log_must_be_a_regular_file(tmp_path: Path) -> None:
    """Another user of the machine may have put a FIFO or a link to a device there."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("/dev/null")
    for name in ("fifo", "link"):
        with pytest.raises(StorageFailure, match=f"cannot write {tmp_path}/{name}: "):
            Log(tmp_path / name)


def test_everything_that_was_written_before_the_end_is_read(tmp_path: Path, log: Log) -> None:
    shown = io.BytesIO()
    stream = Stream(log, shown.write)
    with Pipes(tmp_path, {"0.out": stream.take}, {}) as pipes:
        pipes.start()
        # This write blocks until the other end has read most of it.
        with (tmp_path / "0.out").open("wb") as pipe:
            pipe.write(b"line\n" * 200_000 + b"end")
    stream.close()
    assert shown.getvalue() == b"line\n" * 200_000 + b"end\n"


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


@pytest.mark.parametrize("blocking", [True, False])
def test_a_slow_reader_gets_all_of_the_output(pipe: tuple[int, int], blocking: bool) -> None:
    """Another program may have set the pipe to non-blocking, so that a full pipe is an error."""
    os.set_blocking(pipe[1], blocking)
    data = bytes(range(256)) * 2000
    writer = threading.Thread(target=write_all, args=(pipe[1], data))
    writer.start()
    read = b""
    while len(read) < len(data):
        read += os.read(pipe[0], 1000)
    writer.join()
    assert read == data


def test_only_a_stop_does_not_wait_for_a_reader(
    pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams.Readers, "most_s", streams.Readers.most_s)
    monkeypatch.setattr(streams, "_MOST_WAIT_S", 0.3)
    writer = threading.Thread(target=write_all, args=(pipe[1], bytes(2**20)))
    writer.start()
    writer.join(1)
    assert writer.is_alive()
    streams.stop_waiting_for_readers()
    writer.join()
    write_all(pipe[1], b"to nobody")
    assert set(os.read(pipe[0], 2**20)) == {0}


_SPAM = """
import sys, time
print("begun", file=sys.stderr, flush=True)
while True:
    print(999 * "x", flush=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("streams_of", ["out", "out and err"])
def test_a_script_whose_output_nobody_reads_can_be_stopped(tmp_path: Path, streams_of: str) -> None:
    (tmp_path / "spam.py").write_text(_SPAM)
    command = [*command_of(ENTRYPOINT, "run"), "--run", "r", "--device", "cpu", "spam.py"]
    log = tmp_path / "runs/r/logs/rank-0.log"
    with subprocess.Popen(
        command,
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=str(ROOT)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT if streams_of == "out and err" else subprocess.DEVNULL,
    ) as process:
        wait_until(lambda: log.exists() and log.stat().st_size > 2**15, process)
        process.terminate()
        assert process.wait(120) == 128 + signal.SIGTERM
    manifest = json.loads((tmp_path / "runs/r/manifest.json").read_text())
    assert manifest["starts"][0]["exit_code"] == 128 + signal.SIGTERM
