"""The plugin that runs the tests in forks, on small test files."""

import os
import subprocess
import sys
from pathlib import Path

from tests.support.commands import clean_environment

_PASSES = """
import os, pathlib, pytest, time

@pytest.fixture(scope="session")
def number():
    yield 1
    pathlib.Path("ended").touch()

def _meet(name):
    # Wait for two tests that run at the same time.
    pathlib.Path(name).write_text(str(os.getpid()))
    for other in ("first", "second", "waiting"):
        while not pathlib.Path(other).exists():
            time.sleep(0.01)

def test_in_the_first_file(number, tmp_path):
    _meet("first")
    assert tmp_path.parent.name.startswith("fork-")

def test_skipped():
    pytest.skip("for a reason")
"""
_ALSO_PASSES = """
from test_first import _meet
import pytest

def test_in_the_second_file():
    _meet("second")

@pytest.mark.waits
def test_that_waits():
    _meet("waiting")
"""
_FAILS = """
import os, signal

def test_fails():
    print("printed by the test")
    assert 1 + 1 == 3

def test_ends_its_process():
    os.kill(os.getpid(), signal.SIGKILL)
"""
_RETURNS_TWICE = """
import os, pathlib

def test_forks():
    if pid := os.fork():
        os.waitpid(pid, 0)

def test_fails_in_the_parent():
    pathlib.Path("ran").mkdir()
"""


def _pytest(folder: Path, *words: str) -> tuple[int, str]:
    command = [sys.executable, "-P", "-m", "pytest", "-p", "tests.support.forked_workers"]
    ended = subprocess.run(
        [*command, "--forks", "2", "-ra", "-o", "markers=waits", "-p", "no:cacheprovider", *words],
        cwd=folder,
        env=clean_environment(PYTEST_DEBUG_TEMPROOT=str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return ended.returncode, ended.stdout


def test_the_files_and_the_tests_that_wait_run_in_own_forks(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(_PASSES)
    (tmp_path / "test_second.py").write_text(_ALSO_PASSES)
    code, out = _pytest(tmp_path)
    assert code == 0 and "3 passed, 1 skipped" in out and ": for a reason" in out, out
    pids = {int((tmp_path / name).read_text()) for name in ("first", "second", "waiting")}
    assert len(pids) == 3 and os.getpid() not in pids
    assert (tmp_path / "ended").exists()


def test_a_failure_and_a_lost_worker_fail_the_run(tmp_path: Path) -> None:
    (tmp_path / "test_first.py").write_text(_FAILS)
    code, out = _pytest(tmp_path)
    assert code == 1 and "2 failed" in out, out
    assert "assert (1 + 1) == 3" in out and "printed by the test" in out
    assert "the worker ended during or after test_first.py::test_ends_its_process" in out


def test_a_run_fails_if_a_test_does_not_end_exactly_once(tmp_path: Path) -> None:
    # The fork of a test returns into pytest, and runs the other tests as well.
    (tmp_path / "test_first.py").write_text(_RETURNS_TWICE)
    code, out = _pytest(tmp_path)
    assert code == 1 and "tests did not end exactly once: test_first.py::test_forks" in out, out
