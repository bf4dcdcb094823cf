"""Loader workers start, although a fork of them hangs."""

import multiprocessing
import os
import signal
import sys
from multiprocessing import popen_fork

import pytest
import torch
from torch.utils.data import TensorDataset

from trainer.data import workers
from trainer.data.examples import read_examples
from trainer.data.workers import worker_context

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 11, 10) or sys.platform != "linux", reason="no fork of it hangs"
)


def test_a_worker_that_hangs_in_its_fork_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    real, pids = os.fork, list[int]()

    def fork() -> int:
        pids.append(real())
        if pids[-1] == 0 and len(pids) < 3:
            signal.pause()
        return pids[-1]

    monkeypatch.setattr(popen_fork.os, "fork", fork)
    monkeypatch.setattr(workers, "_START_S", 0.05)
    dataset = TensorDataset(torch.arange(3.0))
    read, _ = read_examples(dataset, 0, [0, 2], 1)
    assert [batch[0].tolist() for batch in read] == [[0], [2]]
    assert len(pids) >= 3
    for pid in pids[:-1]:
        with pytest.raises(ChildProcessError):  # it was waited for
            os.waitpid(pid, 0)


@pytest.mark.parametrize(("method", "checked"), [(None, True), ("fork", True), ("spawn", False)])
def test_the_start_method_of_a_task_stays(
    monkeypatch: pytest.MonkeyPatch, method: str | None, checked: bool
) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda *, allow_none: method)
    assert (worker_context() is not None) == checked
