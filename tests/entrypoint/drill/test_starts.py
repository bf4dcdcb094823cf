"""How the trainings of a drill start, and how they are killed."""

import subprocess
from pathlib import Path

import pytest

from entrypoint.drill import starts
from entrypoint.drill.starts import environment
from trainbox.contract.variables import HEALTH_NAMES, LAUNCH_NAMES


def test_a_training_has_no_settings_of_another_launch() -> None:
    kept = {"HOME": "/h", "TRAINBOX_BATCH_SIZE": "8", **dict.fromkeys(HEALTH_NAMES, "no")}
    dropped = {
        **dict.fromkeys(LAUNCH_NAMES - HEALTH_NAMES, "2"),
        "SLURM_JOB_NUM_NODES": "2",
        "TRAINBOX_EPOCHS": "9",
    }
    assert environment(kept | dropped) == kept


def test_a_kill_waits_for_a_process_that_ends_and_has_no_variables_any_more(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A process frees its memory, with its variables, before it closes its files."""
    with (
        subprocess.Popen(["sleep", "600"]) as launcher,
        subprocess.Popen(["sleep", "600"]) as rank,
    ):
        looks = 0

        def with_variable(_name: str, _value: str) -> list[int]:
            nonlocal looks
            looks += 1
            if looks == 5:
                rank.kill()
                rank.wait()
            return [launcher.pid, rank.pid] if looks == 1 else []

        monkeypatch.setattr(starts, "with_variable", with_variable)
        starts.kill(launcher, tmp_path)
        ended = rank.returncode
        rank.kill()
    assert ended is not None
