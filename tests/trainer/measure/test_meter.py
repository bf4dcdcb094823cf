"""The measurements of a training for `trainbox bench`."""

import itertools
import time
from collections.abc import Iterator
from typing import Any

import pytest

import trainer.loop.fit
from tests.support.here import Here
from tests.support.tiny import TINY

FOREVER = (
    *("--max-steps", "1000000000", "--eval-every", "1000000000", "--device", "cpu"),
    *("--run", "r", "--threads", "1"),
)


def measure(here: Here, seconds: float, *arguments: str) -> dict[str, Any]:
    here.succeeds("train", TINY, *FOREVER, "--measure-seconds", f"{seconds}", *arguments)
    found = here.json("measured.json")
    assert isinstance(found, dict)
    return found


def test_a_measured_training_ends_by_itself_and_saves_nothing(here: Here) -> None:
    found = measure(here, 0.3, "--batch-size", "10", "--accumulation", "2")
    assert found["seconds"] >= 0.3
    assert found["steps"] >= 5
    assert found["samples_per_second"] == pytest.approx(found["steps"] * 10 / found["seconds"])
    assert 0 < found["data_seconds"][0] < found["seconds"]
    assert found["exchange_seconds"] is None
    assert 50 < found["memory_mib"][0] < 100_000
    settings = {
        name: found[name]
        for name in ("device", "batch_size", "accumulation", "workers", "threads", "examples")
    }
    assert settings == {
        "device": "cpu",
        "batch_size": 10,
        "accumulation": 2,
        "workers": 0,
        "threads": 1,
        "examples": 50,
    }
    assert here.steps() == []
    assert here.entries("validation") == []


def test_the_warm_up_and_the_end_are_not_measured(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock advances by 1000 s at the first batch, and by 1 s at each other batch."""
    taken = itertools.count()
    now = [0.0]

    def slow_first(*arguments: Any) -> Iterator[Any]:
        for number, batch in enumerate(batches(*arguments)):
            next(taken)
            now[0] += 1000.0 if number == 0 else 1.0
            yield batch

    batches = trainer.loop.fit.training_batches
    monkeypatch.setattr(trainer.loop.fit, "training_batches", slow_first)
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    found = measure(here, 60)
    # The warm-up takes a fifth of the time, and is checked after 1, 2, 4, 8 and 16 steps. Then come
    # 60 steps of one second, which only wait for data.
    assert (found["steps"], found["seconds"], found["data_seconds"]) == (60, 60.0, [60.0])
    # One more step follows, so that the end of the training is not measured.
    assert next(taken) == 16 + 60 + 1
