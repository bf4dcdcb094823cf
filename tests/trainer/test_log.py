"""An entry of the log: what it warns of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer import log
from trainer.elapsed import Elapsed


def _job(nnodes: int, exchange_seconds: list[float], said: list[str]) -> Any:
    taken = iter(exchange_seconds)
    return SimpleNamespace(
        process=SimpleNamespace(nnodes=nnodes, world_size=4, is_sharded=False),
        reduction=SimpleNamespace(exchange=SimpleNamespace(seconds=lambda: next(taken))),
        run=SimpleNamespace(say=said.append),
        progress=SimpleNamespace(step=100),
        exchange_seconds=0.0,
        told_of_exchange=False,
    )


def _entries(job: Any, count: int) -> list[float | None]:
    """The shares of `count` entries of 10 s and 50 steps each."""
    shares = []
    for _ in range(count):
        shares.append(log._exchange_share(job, 10.0))
        log._warn_of_a_slow_network(job, shares[-1] or 0, 0.2)
    return shares


def test_a_slow_network_is_told_once() -> None:
    said: list[str] = []
    assert _entries(_job(2, [4.9, 9.9, 18.9], said), 3) == [pytest.approx(0.49), pytest.approx(0.5), pytest.approx(0.9)]
    assert said == [
        "step 100: 50% of the time goes by until the machines have each other's gradients (100 ms a step): the network is slow "
        "for this model, or a machine is slower than the others; one machine alone may be faster, and a larger --batch-size "
        "exchanges less often"
    ]


def test_one_machine_has_no_network_to_tell_of() -> None:
    said: list[str] = []
    assert _entries(_job(1, [9.0], said), 1) == [pytest.approx(0.9)]
    assert said == []


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
