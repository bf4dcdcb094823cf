"""The warnings of the training log, and the time that it measures."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.loop.log import TrainingLog
from trainer.parallel.world import World
from trainer.system.elapsed import Elapsed


def _job(nnodes: int, least: list[float], reports: list[str]) -> Any:
    """Return a job of four ranks with entries of 6 s.

    One rank exchanges for `least` seconds, the others for 1 s more. `reports` gets the messages.
    """
    taken = itertools.accumulate(least, initial=3.0)  # 3 s before the first entry
    others = torch.tensor([[0.0]] + [[1 / 6]] * 3)
    return SimpleNamespace(
        world=SimpleNamespace(
            nnodes=nnodes,
            world_size=4,
            gather_rows=lambda own, _counts: own + others,
        ),
        strategy=SimpleNamespace(forward_is_collective=False),
        reduction=SimpleNamespace(exchange_time=SimpleNamespace(seconds=lambda: next(taken))),
        run=SimpleNamespace(report=reports.append),
        state=SimpleNamespace(progress=SimpleNamespace(step=100)),
    )


def _log(nnodes: int, *least: float) -> tuple[list[list[float]], list[str]]:
    """Return the shares of the entries after the first, of 30 steps each, and the reports."""
    reports: list[str] = []
    log, found = TrainingLog(_job(nnodes, list(least), reports)), []
    assert log._exchange_shares(6.0) == []  # the first entry
    for _ in least:
        found.append(log._exchange_shares(6.0))
        log._warn_of_a_slow_network(min(found[-1]), 30, 6.0)
    return found, reports


def test_a_slow_network_is_reported_once() -> None:
    shares, reports = _log(2, 3.3, 3.6, 4.5)
    assert shares[1] == pytest.approx([0.6, 0.6 + 1 / 6, 0.6 + 1 / 6, 0.6 + 1 / 6])
    assert reports == [
        "step 100: the exchange of gradients takes 60% of the time (120 ms a step), because the "
        "network is slow for this model: use one machine, or a larger --batch-size to exchange "
        "less often"
    ]
    assert len(_log(2, 6.0, 6.0, 0.0, 6.0, 6.0)[1]) == 1


def test_a_short_slowdown_of_the_network_is_not_reported() -> None:
    assert _log(2, 6.0, 2.9, 6.0, 2.9, 6.0)[1] == []


def test_one_machine_has_no_network_warning() -> None:
    assert _log(1, 6.0, 6.0, 6.0)[1] == []


def test_the_number_of_machines_comes_from_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    process = World(0, 4, torch.device("cpu"))
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    assert process.nnodes == 1
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    assert process.nnodes == 3


def test_a_cpu_is_timed_by_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    elapsed = Elapsed(torch.device("cpu"))
    for _ in range(2):
        with elapsed():
            now[0] += 0.25
        now[0] += 10
    assert elapsed.seconds() == 0.5


def test_a_gpu_is_timed_by_events_without_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU records events at 1, 2, 3 ... ms. Only reading the seconds waits for it."""
    recorded, waited = [], []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            recorded.append(self)

        def synchronize(self) -> None:
            waited.append(self)

        def elapsed_time(self, end: "Event") -> float:
            return float(recorded.index(end) - recorded.index(self))

    monkeypatch.setattr(torch.cuda, "Event", Event)
    elapsed = Elapsed(torch.device("cuda", 0))
    for _ in range(3):
        with elapsed():
            pass
    assert waited == []
    assert elapsed.seconds() == elapsed.seconds() == pytest.approx(0.003)
    assert waited == [recorded[-1]]
    for _ in range(1000):  # many events before the next reading
        with elapsed():
            pass
    assert (len(waited), elapsed.seconds()) == (2, pytest.approx(1.003))
