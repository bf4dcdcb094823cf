"""A training without progress says where it waits."""

import re
import time
from pathlib import Path

import pytest

from trainer.records import console, quiet
from trainer.records.console import Console


def test_a_line_after_ten_minutes_without_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = [1000.0]
    monkeypatch.setattr(quiet.time, "monotonic", lambda: now[0])
    terminal = Console(tmp_path / "log", prints=True)
    for minutes, lines in ((9.9, 0), (0.2, 1), (60, 1)):
        now[0] += 60 * minutes
        terminal.look()
        assert (tmp_path / "log").read_text().count("no step for 10 minutes") == lines
    list(terminal.validation_bar([1], 1))  # a batch of a validation is progress
    now[0] += 60 * 9
    terminal.look()
    terminal.count_step()
    now[0] += 60 * 9
    terminal.look()
    assert capsys.readouterr().out.count("no step for") == 1
    now[0] += 60 * 2
    terminal.look()
    terminal.close()
    lines = capsys.readouterr().out.splitlines()
    wanted = r"no step for 10 minutes, waiting for \w+ \(.*, line \d+\): --hang-minutes N ends .*"
    assert len(lines) == 1
    assert re.fullmatch(wanted, lines[0])


def test_the_heartbeat_is_there_from_the_start_and_then_only_with_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive = tmp_path / "alive"
    monkeypatch.setenv("TRAINBOX_HEARTBEAT", str(alive))
    monkeypatch.setattr(console, "_BEAT_EVERY_S", -1.0)
    terminal = Console(tmp_path / "log", prints=True)
    terminal.look()
    assert alive.stat().st_mtime > time.time() - 60
    assert float(alive.read_text()) == pytest.approx(time.monotonic(), abs=60)
    for step in (terminal.count_step, lambda: list(terminal.validation_bar([1], 1))):
        alive.unlink()
        step()
        assert alive.exists()
    alive.unlink()
    terminal.look()
    assert not alive.exists()
    terminal.close()
