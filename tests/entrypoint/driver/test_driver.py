"""The process that queries the NVIDIA driver, and its end."""

import subprocess
import sys
from pathlib import Path

import pytest

from entrypoint.driver import nvml
from entrypoint.driver.process import Driver
from tests.support.commands import clean_environment
from trainbox.errors import DeviceMissing

# Orphans of the command become children of this program, which counts them.
_COUNT_ORPHANS = """
import ctypes, os, subprocess, sys
PR_SET_CHILD_SUBREAPER = 36
assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1) == 0
subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
orphans = 0
try:
    while True:
        os.waitpid(-1, 0)
        orphans += 1
except ChildProcessError:
    print(orphans)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a subreaper is a Linux feature")
@pytest.mark.parametrize(
    "arguments",
    [
        ("health", "--live"),
        ("plan", "digits"),
        ("doctor",),
    ],
)
def test_no_process_is_left_when_a_command_ends(arguments: tuple[str, ...], tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "entrypoint", *arguments]
    # The doctor's child imports torch, which takes seconds.
    (tmp_path / "fake").mkdir()
    (tmp_path / "fake/sitecustomize.py").write_text("import sys\nsys.modules['torch'] = None\n")
    counted = subprocess.run(
        [sys.executable, "-c", _COUNT_ORPHANS, *command],
        cwd=tmp_path,
        env=clean_environment(PYTHONPATH=str(tmp_path / "fake")),
        capture_output=True,
        text=True,
        check=True,
    )
    assert counted.stdout == "0\n"


def test_a_reading_that_was_left_out_is_made_again_after_minutes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(nvml.pynvml, "nvmlInit", lambda: None)
    monkeypatch.setattr(nvml.pynvml, "nvmlDeviceGetCount", lambda: 1)
    monkeypatch.setattr(nvml.pynvml, "nvmlDeviceGetHandleByUUID", lambda _uuid: "handle")
    monkeypatch.setattr(nvml, "DRIVER_READERS", {})
    monkeypatch.setitem(nvml.READERS, "temperature_c", lambda _handle: 33)
    now_s = 1000.0
    monkeypatch.setattr(nvml.time, "monotonic", lambda: now_s)
    session = nvml.Session(left_out=["temperature_c"])

    def read() -> object:
        return session.sample(["GPU-1"], ["temperature_c"]).gpus["GPU-1"]["temperature_c"]

    assert str(read()) == "left out: an earlier call crashed or hung"
    now_s += nvml.RETRIED_AFTER_S
    assert read() == 33


def test_an_error_in_the_process_is_reported_with_its_type() -> None:
    driver = Driver()
    driver.ask("no_such_question")
    with pytest.raises(DeviceMissing, match="^the query of the NVIDIA driver failed: Attribute"):
        driver.answer()
    assert driver.died_at_s is not None
    driver.close()
