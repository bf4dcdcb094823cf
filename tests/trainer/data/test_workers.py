"""Loader workers start, although a fork of them hangs."""

import gc
import multiprocessing
import os
import signal
import sys
from multiprocessing import popen_fork
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from trainbox.errors import Failure
from trainer.data import workers
from trainer.data.examples import read_examples
from trainer.data.workers import worker_context

pytestmark = pytest.mark.skipif(
    sys.version_info >= (3, 11, 10) or sys.platform != "linux", reason="no fork of it hangs"
)


def _forks(monkeypatch: pytest.MonkeyPatch, hanging: int) -> list[int]:
    """Let the first `hanging` forks of workers hang; return the pids of all, which are added."""
    real, pids = os.fork, list[int]()

    def fork() -> int:
        pids.append(real())
        if pids[-1] == 0 and len(pids) <= hanging:
            signal.pause()
        return pids[-1]

    monkeypatch.setattr(popen_fork.os, "fork", fork)
    return pids


def _check_waited_for(pids: list[int]) -> None:
    for pid in pids:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, 0)


def test_a_worker_that_hangs_in_its_fork_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = _forks(monkeypatch, hanging=2)
    real_poll, limits_s = Connection.poll, list[float]()

    def poll(connection: Any, limit_s: float = 0.0) -> bool:
        limits_s.append(limit_s)
        return real_poll(connection, limit_s)

    monkeypatch.setattr(Connection, "poll", poll)
    monkeypatch.setattr(workers, "_START_S", 0.05)
    dataset = TensorDataset(torch.arange(3.0))
    read, _ = read_examples(dataset, [0, 2], 1)
    assert [batch[0].tolist() for batch in read] == [[0], [2]]
    assert len(pids) >= 3
    assert limits_s[:3] == [0.05, 0.1, 0.2]
    _check_waited_for(pids[:-1])


def _after_its_message(monkeypatch: pytest.MonkeyPatch, then: Any) -> None:
    """Call `then` once instead of an answer to a worker, when the worker is ready."""
    real = Connection.poll

    def poll(connection: Any, _limit_s: float) -> bool:
        monkeypatch.setattr(Connection, "poll", real)
        assert connection.poll(None)
        return bool(then())

    monkeypatch.setattr(Connection, "poll", poll)


def test_a_worker_that_is_ready_too_late_has_done_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = _forks(monkeypatch, hanging=0)

    def time_is_over() -> bool:
        state = ""
        while state not in ("S", "Z"):  # it waits for the answer, or has run
            state = Path(f"/proc/{pids[0]}/stat").read_text().rpartition(")")[2].split()[0]
        return False

    _after_its_message(monkeypatch, time_is_over)
    reader, writer = os.pipe()
    process = _process(target=os.write, args=(writer, b"runs once"))
    gc.collect()  # otherwise this could close files of earlier tests meanwhile
    open_files = len(list(Path("/proc/self/fd").iterdir()))
    process.start()
    process.join()
    process.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == open_files
    assert len(pids) == 2
    assert os.read(reader, 100) == b"runs once"
    os.close(reader)
    os.close(writer)


def test_a_worker_exits_if_its_parent_dies_before_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # for the traceback of the worker
        _after_its_message(monkeypatch, lambda: os._exit(0))
        _process(target=os.write, args=(writer, b"runs")).start()
    os.close(writer)
    os.waitpid(pid, 0)
    assert not os.read(reader, 100)  # the end, when the worker has exited
    os.close(reader)


def test_the_exit_code_of_a_worker_that_dies_in_its_fork_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = os.fork
    monkeypatch.setattr(popen_fork.os, "fork", lambda: real() or os._exit(7))
    process = _process()
    process.start()
    process.join()
    assert process.exitcode == 7


def _process(**arguments: Any) -> Any:
    context = worker_context()
    assert context is not None
    return context.Process(**arguments)


def test_a_worker_that_never_runs_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    pids = _forks(monkeypatch, hanging=99)
    monkeypatch.setattr(workers, "_START_S", 0.01)
    with pytest.raises(Failure, match="a loader worker did not start .*, in 5 attempts: .*"):
        read_examples(TensorDataset(torch.arange(3.0)), [0], 1)
    assert len(pids) == 5
    _check_waited_for(pids)


@pytest.mark.parametrize(("method", "checked"), [(None, True), ("fork", True), ("spawn", False)])
def test_the_start_method_of_a_task_stays(
    monkeypatch: pytest.MonkeyPatch, method: str | None, checked: bool
) -> None:
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda *, allow_none: method)
    assert (worker_context() is not None) == checked
