"""The warnings of the training log, and the time that it measures."""

import itertools
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from tests.support.here import Here
from trainer.data.batches import TimedBatches
from trainer.loop.log import TrainingLog
from trainer.loop.state import Stopwatch
from trainer.parallel.world import World
from trainer.records.console import Console
from trainer.system.elapsed import Elapsed


def _job(nnodes: int, least: list[float], reports: list[str]) -> Any:
    """Return a job of four ranks with entries of 6 s.

    One rank exchanges for `least` seconds, the others for 1 s more. `reports` gets the messages.
    """
    taken = itertools.accumulate(least, initial=3.0)  # 3 s before the first entry
    others = torch.tensor([[0.0, 0.0]] + [[0.0, 1 / 6]] * 3)
    return SimpleNamespace(
        world=SimpleNamespace(
            nnodes=nnodes,
            world_size=4,
            gather_rows=lambda own: own + others,
        ),
        strategy=SimpleNamespace(forward_is_collective=False),
        reduction=SimpleNamespace(exchange_time=SimpleNamespace(seconds=lambda: next(taken))),
        run=SimpleNamespace(report=reports.append),
        workers=2,
        state=SimpleNamespace(progress=SimpleNamespace(step=100)),
    )


def _log(nnodes: int, *least: float) -> tuple[list[list[float]], list[str]]:
    """Return the shares of the entries after the first, of 30 steps each, and the reports."""
    reports: list[str] = []
    log, found = TrainingLog(_job(nnodes, list(least), reports), TimedBatches(iter([]))), []
    assert log._shares(6.0) == ([], [])  # the first entry
    for _ in least:
        data, exchange = log._shares(6.0)
        assert data == [0.0] * 4
        found.append(exchange)
        log._warn_of_slow_parts([], exchange, 30, 6.0)
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
    assert _log(2, 6.0, 2.9, 6.0, 2.9, 6.0)[1] == []  # short slowdowns
    assert _log(1, 6.0, 6.0, 6.0)[1] == []  # one machine


def _slow_data(monkeypatch: pytest.MonkeyPatch, dataset: Any, *waits_s: float) -> list[str]:
    """Return the reports of entries of 6 s, 30 steps each, that wait `waits_s` for data."""
    now = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    def slow() -> Iterator[int]:
        for wait_s in (5.0, *waits_s):  # the first entry includes the start of the workers
            now[0] += wait_s
            yield 1

    reports: list[str] = []
    job = _job(1, [], reports)
    job.world = World(0, 1, torch.device("cpu"))
    job.train = dataset
    batches = TimedBatches(slow())
    log = TrainingLog(job, batches)
    next(batches)
    assert log._shares(6.0) == ([], [])
    for wait_s in waits_s:
        now[0] += 100  # computing
        next(batches)
        data, exchange = log._shares(6.0)
        assert (data, exchange) == ([pytest.approx(wait_s / 6)], [])
        log._warn_of_slow_parts(data, [], 30, 6.0)
    return reports


def test_slow_data_are_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _slow_data(monkeypatch, [], 3.0, 2.4, 3.0, 3.0) == [
        "step 100: waiting for data takes 40% of the time (80 ms a step), with 2 loader worker(s) "
        "a process: raise --workers, make __getitem__ faster, or hold the dataset in memory as a "
        "TensorDataset"
    ]
    assert _slow_data(monkeypatch, [], 3.0, 1.7, 3.0, 1.7) == []
    in_memory = TensorDataset(torch.zeros(3))
    assert _slow_data(monkeypatch, in_memory, 3.0, 3.0, 3.0) == []


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
            self.at_ms = len(recorded)
            recorded.append(self)

        def synchronize(self) -> None:
            waited.append(self)

        def elapsed_time(self, end: "Event") -> float:
            return float(end.at_ms - self.at_ms)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    elapsed = Elapsed(torch.device("cuda", 0))
    for _ in range(3):
        with elapsed():
            pass
    assert waited == []
    assert elapsed.seconds() == elapsed.seconds() == pytest.approx(0.003)
    assert waited == [recorded[-1]]
    for _ in range(10_000):  # many events before the next reading
        with elapsed():
            pass
    assert (len(waited), elapsed.seconds()) == (2, pytest.approx(10.003))


def test_a_validation_shows_only_the_metrics_of_its_own_step() -> None:
    log = TrainingLog(_job(1, [], []), TimedBatches(iter([])))
    assert log.line_at(0) == ""
    log._metrics = (100, {"near": 0.5, "far": 0.25})
    assert log.line_at(100) == "training near 0.5000, far 0.2500"
    assert log.line_at(101) == ""


def test_a_spike_is_reported_from_the_sixth_entry_on() -> None:
    reports: list[str] = []
    log = TrainingLog(_job(1, [], reports), TimedBatches(iter([])))
    for loss in (1.0, 2.0, 50.0, 2.0, 70.0, 20.0):  # the median is 2, from the fifth entry on
        log._warn_of_a_spike(loss)
    assert reports == []
    log._warn_of_a_spike(120.0)  # the median is 11
    assert reports == [
        "step 100: the loss 120 is 11 times the usual 11: check the data of these steps, or use "
        "--clip-norm or a lower --lr"
    ]
    for loss in (*[1000.0] * 30, *[1.0] * 20):  # only the last 20 entries count
        log._warn_of_a_spike(loss)
    reports.clear()
    log._warn_of_a_spike(10.5)
    assert len(reports) == 1
    assert reports[0].startswith("step 100: the loss 10.5 is 10 times the usual 1: ")


def test_an_entry_has_its_epoch_and_its_speed(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    speeds: list[str] = []
    monkeypatch.setattr(Stopwatch, "lap", lambda _watch, _step: (3, 2.0))
    monkeypatch.setattr(Console, "report_progress", lambda _, _line, speed: speeds.append(speed))
    here.train(epochs=2, log_steps=3)
    assert speeds == [f", 12 samples/s, {left} s to go" for left in (6, 4, 2, 0)]
    assert [
        (entry["step"], entry["epoch"], entry["samples_per_second"])
        for entry in here.entries("train")
    ] == [(3, 1, 12.0), (6, 1, 12.0), (9, 2, 12.0), (12, 2, 12.0)]
