"""The load that tests are run beside."""

import sys
from pathlib import Path

import pytest

from tests.support import load


def test_the_command_runs_beside_busy_processes_which_end_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started: list[int] = []
    real = load.subprocess.Popen

    class Noted(real):  # type: ignore[type-arg, misc, valid-type]
        def __init__(self, words: list[str], **more: object) -> None:
            super().__init__(words, **more)  # type: ignore[call-overload]
            started.append(self.pid)

    monkeypatch.setattr(load.subprocess, "Popen", Noted)
    assert load.main(["--cores", "2", "--", sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert len(started) == 3  # two busy processes and the command
    assert [pid for pid in started if Path(f"/proc/{pid}").exists()] == []
