"""A rank whose GPU waits for another process exits with code 7, before NCCL aborts it."""

import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainbox.processes.environment import Internal
from trainer.parallel import world
from trainer.parallel.stalled_gpu import start_watch

_PROGRAM = """
import threading
from trainer.parallel.stalled_gpu import start_watch

def record():
    done.append(len(done) < 3)  # the third recorded work never ends
    return lambda: done[-1]

done = []
start_watch(record, 0.06)
threading.Event().wait()
"""
_MESSAGE = (
    "lost contact with another process: the GPU's work timed out after 0 s, most likely because "
    "another process does not take part in an exchange"
)


def test_work_that_does_not_end_exits_with_code_7_and_a_message(tmp_path: Path) -> None:
    """The launcher recognizes `timed out` in the message."""
    ended = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        env={"PATH": "", Internal.MESSAGES: str(tmp_path), "RANK": "3"},
        check=False,
    )
    assert ended.returncode == 7
    assert (tmp_path / "3").read_text() == _MESSAGE


def test_the_watch_ends_if_the_gpu_has_failed() -> None:
    """The training reports the error of its GPU itself."""
    asked = threading.Event()

    def record() -> Callable[[], bool]:
        def fail() -> bool:
            asked.set()
            raise RuntimeError("CUDA error: unspecified launch failure")

        return fail

    start_watch(record, 1e9)
    assert asked.wait(60)
    for thread in threading.enumerate():
        if thread.name == "stalled":
            thread.join(60)
            assert not thread.is_alive()


@pytest.mark.parametrize("name", ["set_timeout", "_set_default_timeout"])
def test_nccl_waits_longer_than_gloo_and_the_watch(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    limits: dict[str, Any] = {}

    def init(_backend: str, _where: str, timeout: timedelta, *_ranks: int) -> None:
        limits["gloo"] = timeout.total_seconds()

    def set_timeout(timeout: timedelta) -> None:
        limits["nccl"] = timeout.total_seconds()

    nccl = SimpleNamespace(**{name: set_timeout})
    group = SimpleNamespace(WORLD=SimpleNamespace(_get_backend=lambda _device: nccl))
    for variable, value in {"LOCAL_RANK": "0", "RANK": "0", "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(world, "choose_device", lambda *_: torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(dist, "init_process_group", init)
    monkeypatch.setattr(dist, "group", group)
    monkeypatch.setattr(dist, "new_group", lambda **_: None)
    monkeypatch.setattr(
        world, "GpuWatch", lambda device, limit_s: limits.update({str(device): limit_s})
    )
    world.World.start("cuda")
    assert limits["nccl"] > limits["gloo"] == limits["cuda:0"] == 600
    # The installed torch has the method, but its NCCL cannot start without a GPU.
    assert callable(dist.ProcessGroupNCCL.set_timeout)
