"""The progress bars of a training."""

import contextlib
import io
from collections.abc import Iterator
from pathlib import Path

import pytest

from trainer.data.schedule import Schedule
from trainer.records.console import Console


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return the time of the bars, in seconds, which only a test changes."""
    now = [1000.0]
    monkeypatch.setattr("tqdm.std.time", lambda: now[0])
    return now


def _validated(tmp_path: Path, clock: list[float], seconds: float, stderr: io.StringIO) -> int:
    """Return how many of 10 batches of `seconds` each a console has given."""

    def batches() -> Iterator[int]:
        for number in range(10):
            clock[0] += seconds
            yield number

    with contextlib.redirect_stderr(stderr):
        console = Console(tmp_path / "log", prints=True)
        console.start_bar(0, Schedule(0, 64, 8, 8, ()))
        count = sum(1 for _ in console.validation_bar(batches(), 10))
        console.close()
    return count


def test_a_long_validation_has_a_bar(tmp_path: Path, clock: list[float]) -> None:
    terminal = _Terminal()
    assert _validated(tmp_path, clock, 0.5, terminal) == 10
    assert "validation   10%" not in terminal.getvalue()  # within the first two seconds
    assert "validation   50% |" in terminal.getvalue()
    assert " 5/10 batches [00:02<00:02]" in terminal.getvalue()


def test_a_short_validation_has_no_bar(tmp_path: Path, clock: list[float]) -> None:
    terminal = _Terminal()
    assert _validated(tmp_path, clock, 0.1, terminal) == 10
    assert "samples" in terminal.getvalue()
    assert "validation" not in terminal.getvalue()


def test_a_bar_needs_a_terminal(tmp_path: Path, clock: list[float]) -> None:
    stream = io.StringIO()
    assert _validated(tmp_path, clock, 9.0, stream) == 10
    assert stream.getvalue() == ""


def test_a_long_rehearsal_has_a_bar_and_no_line_in_the_log(
    tmp_path: Path, clock: list[float]
) -> None:
    terminal = _Terminal()
    with contextlib.redirect_stderr(terminal):
        console = Console(tmp_path / "log", prints=True)
        console.start_rehearsal_bar(6)
        for part_s in (1.5, 1.0, 1.0):
            clock[0] += part_s
            console.count_step()
        console.close()
    assert "rehearsal   17% |" not in terminal.getvalue()  # within the first two seconds
    assert "rehearsal   33% |" in terminal.getvalue()
    assert " 3/6 parts [00:03]" in terminal.getvalue()
    assert (tmp_path / "log").read_text() == ""
