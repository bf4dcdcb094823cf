"""How the trainings of a drill start."""

import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint.drill.starts import wait
from entrypoint.launch.inner_trainings import environment
from trainbox.disclosure.variables import HEALTH_NAMES, LAUNCH_NAMES


def test_a_training_has_no_settings_of_another_launch() -> None:
    kept = {"HOME": "/h", "TRAINBOX_BATCH_SIZE": "8", "TASK": "mnist"}
    kept |= dict.fromkeys(HEALTH_NAMES, "no")
    dropped = {
        **dict.fromkeys(LAUNCH_NAMES - kept.keys(), "2"),
        "TRAINBOX_EPOCHS": "9",
    }
    assert environment(kept | dropped) == kept


def test_a_training_does_not_read_the_input_of_the_drill(tmp_path: Path) -> None:
    """Only one of the starts could read it."""
    script = tmp_path / "train.py"
    script.write_text("import sys\nsys.exit(len(sys.stdin.read()) + 5)")
    arguments = ["run", "--device", "cpu", "--runs-dir", str(tmp_path), str(script)]
    program = "import pathlib, sys\nfrom entrypoint.launch.inner_trainings import start\n"
    program += "folder, *arguments = sys.argv[1:]\nlog = pathlib.Path(folder, 'log')\n"
    program += "sys.exit(start(arguments, log, pathlib.Path(folder)).wait())"
    ended = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path), *arguments], input=b"data", check=False
    )
    assert ended.returncode == 5


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_wait_shows_its_progress_on_a_terminal(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    looks = iter([False, False, True])
    with subprocess.Popen(["sleep", "60"]) as process:
        wait(lambda: next(looks), process, lambda: "start 1: 3 s")
        process.kill()
    assert capsys.readouterr().err == ("\r\x1b[Kstart 1: 3 s\r\x1b[K" if is_terminal else "")
