"""Signals request a stop, and all ranks agree on its step."""

import os
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.commands import wait_until
from tests.support.nodes import free_port
from tests.support.ranks import Ranks, StartedRanks
from trainbox import ranks as ranks_of_trainbox
from trainbox.errors import WrongUse
from trainbox.processes.process_tree import STOP_SIGNALS, children
from trainbox.stop import AgreedStop

_PROGRAM = "tests.support.program"


@pytest.fixture
def request_of_stop() -> AgreedStop:
    return AgreedStop()


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_a_signal_requests_a_stop_for_good(
    request_of_stop: AgreedStop, number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    assert not request_of_stop.agreed()
    os.kill(os.getpid(), number)
    assert request_of_stop.agreed()
    assert request_of_stop.agreed()
    expected = "" if number != signal.SIGINT else "press Ctrl-C again to stop at once"
    assert expected in capfd.readouterr().err


def test_a_second_ctrl_c_interrupts(request_of_stop: AgreedStop) -> None:
    request_of_stop.agreed()
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_a_handler_of_the_script_is_called_and_an_ignored_signal_stays_ignored(
    request_of_stop: AgreedStop,
) -> None:
    calls = []
    signal.signal(signal.SIGTERM, lambda number, _frame: calls.append(number))
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    request_of_stop.agreed()
    os.kill(os.getpid(), signal.SIGUSR1)
    assert not request_of_stop.agreed()
    os.kill(os.getpid(), signal.SIGTERM)
    assert request_of_stop.agreed()
    assert calls == [signal.SIGTERM]


def test_the_first_call_in_a_thread_is_refused() -> None:
    errors = []

    def call() -> None:
        try:
            AgreedStop().agreed()
        except WrongUse as error:
            errors.append(str(error))

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert len(errors) == 1
    assert "the first call of trainbox.stop_requested() is in a thread" in errors[0]


def test_ranks_without_a_process_group_are_refused(
    request_of_stop: AgreedStop, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(WrongUse, match=r"torchrun has started 2 processes, .* call torch\.distri"):
        request_of_stop.agreed()


class _Others:
    """Other ranks, in a simulation with a clock of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, wishes: int) -> None:
        self.now_s, self.votes, self.calls = 0.0, list[int](), 0
        self.stop, self._wishes = 0, wishes
        monkeypatch.setattr(ranks_of_trainbox, "world_size", lambda: 2)
        monkeypatch.setattr(ranks_of_trainbox, "largest", self._largest)
        monkeypatch.setattr(time, "monotonic", lambda: self.now_s)

    def _largest(self, values: Sequence[int]) -> list[int]:
        self.votes.append(self.calls)
        return [max(values[0], self.stop), max(values[1], -self._wishes)]

    def call(self, request: AgreedStop, step_s: float) -> bool:
        self.calls += 1
        self.now_s += step_s
        return request.agreed()


def test_fast_steps_vote_seldom_and_slow_steps_always(
    request_of_stop: AgreedStop, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = _Others(monkeypatch, wishes=1000)
    for _ in range(64):
        others.call(request_of_stop, 1 / 256)
    # At most twice as long as before, then 25 ms.
    assert others.votes == [1, 2, 4, 8, *range(14, 65, 6)]
    for _ in range(400):
        others.call(request_of_stop, 1e-5)
    assert others.votes[-1] - others.votes[-2] == 32
    others.votes.clear()
    for _ in range(40):
        others.call(request_of_stop, 0.1)
    assert others.votes[-3:] == [others.calls - 2, others.calls - 1, others.calls]


def test_the_slowest_rank_decides_and_a_stop_of_another_rank_counts(
    request_of_stop: AgreedStop, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = _Others(monkeypatch, wishes=3)
    for _ in range(50):
        assert not others.call(request_of_stop, 1e-4)
    assert others.votes[-1] - others.votes[-2] == 3
    others.stop = 1
    assert any(others.call(request_of_stop, 1e-4) for _ in range(3))
    votes = len(others.votes)
    assert all(others.call(request_of_stop, 1e-4) for _ in range(10))
    assert len(others.votes) == votes


def _start(ranks: Ranks, processes: int, code: str, **env: str) -> StartedRanks:
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    env = {**address, "TRAINBOX_RUN": str(ranks.folder), **env}
    return ranks.start(processes, code, module=_PROGRAM, env=env)


_LOOP = """
import sys, time
import torch.distributed as dist
import trainbox
{before}
dist.init_process_group("gloo")
for step in range(1, 10**6):
    time.sleep(0.0005 * dist.get_rank())
    if step == 50:
        print("started", flush=True)
    if trainbox.stop_requested():
        print(step, flush=True)
        dist.destroy_process_group()
        sys.exit(75)
"""
_AS_NCCL = "dist.get_backend_config = lambda group: 'cuda:nccl'"


@pytest.mark.parametrize("before", ["", _AS_NCCL], ids=["gloo", "without-cpu"])
def test_ranks_stop_after_the_same_step(ranks: Ranks, before: str) -> None:
    started = _start(ranks, 2, _LOOP.format(before=before))
    wait_until(lambda: all("started" in out for out in started.printed("out")), started)
    started.send_signal(signal.SIGTERM, rank=1)
    ended = started.wait()
    assert ended.codes == [75, 75], ended.errs
    steps = [out.split()[-1] for out in ended.outs]
    assert steps[0] == steps[1]
    assert int(steps[0]) >= 50


_WITH_WORKERS = """
import sys
import trainbox
from torch.utils.data import DataLoader

def main():
    loader = DataLoader(range(10**9), num_workers=1, worker_init_fn={init})
    batches = iter(loader)
    for step, _ in enumerate(batches):
        if step == 10:
            print("started", flush=True)
        if trainbox.stop_requested():
            for _ in range(20):  # the worker still has to load these
                next(batches)
            print("saved", flush=True)
            sys.exit(75)
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_all_processes_leaves_the_workers_until_the_rank_exits(
    ranks: Ranks, number: signal.Signals
) -> None:
    started = _start(ranks, 1, _WITH_WORKERS.format(init="trainbox.ignore_stop_signals"))
    wait_until(lambda: "started" in started.printed("out")[0], started)
    (worker,) = children(started.pid)
    for pid in (worker, started.pid):
        os.kill(pid, number)
    ended = started.wait()
    assert (ended.codes, ended.outs[0].split()[-1]) == ([75], "saved"), ended.errs
    assert not Path(f"/proc/{worker}").exists()
