"""An entry of the log: what it warns of."""

import itertools
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.loop.log import TrainingLog
from trainer.parallel.world import World
from trainer.system.elapsed import Elapsed


def _job(nnodes: int, least: list[float], said: list[str]) -> Any:
    """Of four processes, of which one has `least` seconds of exchange and the others 1 s more; an
    entry takes 6 s.
    """
    taken = itertools.accumulate(least, initial=3.0)  # connections were made before
    others = torch.tensor([[0.0]] + [[1 / 6]] * 3)
    return SimpleNamespace(
        world=SimpleNamespace(
            nnodes=nnodes,
            world_size=4,
            gather_rows=lambda own, _counts: own + others,
        ),
        strategy=SimpleNamespace(forward_is_collective=False),
        reduction=SimpleNamespace(exchange_time=SimpleNamespace(seconds=lambda: next(taken))),
        run=SimpleNamespace(report=said.append),
        state=SimpleNamespace(progress=SimpleNamespace(step=100)),
    )


def _said(nnodes: int, *least: float) -> tuple[list[list[float]], list[str]]:
    """The shares of the entries after the first one, each of 30 steps, and what was said."""
    said: list[str] = []
    log, found = TrainingLog(_job(nnodes, list(least), said)), []
    assert log._exchange_shares(6.0) == []  # of the first entry
    for _ in least:
        found.append(log._exchange_shares(6.0))
        log._warn_of_a_slow_network(min(found[-1]), 30, 6.0)
    return found, said


def test_a_slow_network_is_told_once() -> None:
    shares, said = _said(2, 3.3, 3.6, 4.5)
    assert shares[1] == pytest.approx([0.6, 0.6 + 1 / 6, 0.6 + 1 / 6, 0.6 + 1 / 6])
    assert said == [
        "step 100: the exchange of gradients takes 60% of the time (120 ms a step), because the "
        "network is slow for this model: use one machine, or a larger --batch-size to exchange "
        "less often"
    ]
    assert len(_said(2, 6.0, 6.0, 0.0, 6.0, 6.0)[1]) == 1


def test_a_short_time_of_it_is_not_told() -> None:
    assert _said(2, 6.0, 2.9, 6.0, 2.9, 6.0)[1] == []


def test_one_machine_has_no_network_to_tell_of() -> None:
    assert _said(1, 6.0, 6.0, 6.0)[1] == []


def test_the_number_of_machines_is_torchruns(monkeypatch: pytest.MonkeyPatch) -> None:
    process = World(0, 4, torch.device("cpu"))
    monkeypatch.delenv("GROUP_WORLD_SIZE", raising=False)
    assert process.nnodes == 1
    monkeypatch.setenv("GROUP_WORLD_SIZE", "3")
    assert process.nnodes == 3


def test_on_a_cpu_the_hosts_time_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [5.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    elapsed = Elapsed(torch.device("cpu"))
    for _ in range(2):
        with elapsed():
            now[0] += 0.25
        now[0] += 10
    assert elapsed.seconds() == 0.5


def test_of_a_gpu_its_own_time_is_taken_and_no_step_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events that the GPU comes by at 1, 2, 3 ... ms; only asking for the seconds waits for it."""
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
    for _ in range(1000):  # nobody asks for long
        with elapsed():
            pass
    assert (len(waited), elapsed.seconds()) == (2, pytest.approx(1.003))
