"""Signals before the first step, and ranks whose launcher ends."""

import os
import signal
import subprocess
import sys

import pytest

from tests.support.commands import clean_environment
from trainbox.processes.environment import Internal

# `system` waits for its command in C, so no handler of Python runs meanwhile.
_WAITS = """
import ctypes
from trainer.system.signals import StopRequest
StopRequest.install(ends_at_once=True)
print("ready", flush=True)
ctypes.CDLL(None).system(b"cat")
"""
_STARTS = """
from trainer.system.signals import StopRequest
StopRequest.install()
"""


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGXCPU]
)
def test_before_the_first_step_a_signal_ends_a_rank_that_waits_for_another(
    number: signal.Signals,
) -> None:
    waiting = subprocess.Popen(
        [sys.executable, "-P", "-c", _WAITS],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert waiting.stdout is not None
    assert waiting.stdout.readline() == b"ready\n"
    waiting.send_signal(number)
    try:
        assert waiting.wait() == -number
    finally:
        waiting.communicate()  # ends `cat`


@pytest.mark.skipif(sys.platform != "linux", reason="Linux kills the ranks of an ended launcher")
def test_a_rank_whose_launcher_has_already_ended_is_killed() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", ""])
    launcher.wait()
    codes = [
        subprocess.run(
            [sys.executable, "-P", "-c", _STARTS],
            env=clean_environment(**{Internal.AGENT: str(pid)}),
            check=False,
        ).returncode
        for pid in (os.getpid(), launcher.pid)
    ]
    assert codes == [0, -signal.SIGKILL]
