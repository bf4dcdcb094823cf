"""One, two and three processes compute the same losses to rounding.

They validate each example once.
"""

from typing import Any

import pytest

from tests.support.here import Here, training_here
from tests.support.paths import SUPPORT
from tests.support.ranks import Ranks

_JOBS = SUPPORT / "jobs.py"
_STEPS = 20


@pytest.fixture(scope="module")
def alone(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the training and validation entries of the task digits on one process."""
    with training_here(tmp_path_factory.mktemp("alone")) as here:
        here.train(task="digits", fields={"dropout": "0"}, max_steps=_STEPS, log_steps=1)
        return here.entries("train"), here.entries("validation")


@pytest.mark.parametrize(
    ("processes", "accumulation", "sizes"),
    [
        (2, 1, "32"),
        pytest.param(3, 1, "21 or 22", marks=pytest.mark.slow),
        (3, 2, "10 or 11"),
    ],
)
def test_losses_are_the_same_step_by_step(
    ranks: Ranks,
    alone: tuple[list[dict[str, Any]], list[dict[str, Any]]],
    processes: int,
    accumulation: int,
    sizes: str,
) -> None:
    words = ("digits", "--set", "dropout=0", "--max-steps", str(_STEPS), "--log-steps", "1")
    ended = ranks.train(
        processes, *words, "--device", "cpu", "--run", "r", "--accumulation", str(accumulation)
    )
    batch = f"64 = {processes} processes x {sizes} x {accumulation} accumulation"
    assert f"batch      {batch}\n" in ended.out
    expected, found = alone[0], ranks.entries("r", "train")
    assert [entry["step"] for entry in found] == list(range(1, _STEPS + 1))
    for name in ("loss", "gradient_norm", "learning_rate"):
        assert [entry[name] for entry in found] == pytest.approx(
            [entry[name] for entry in expected], rel=1e-3
        )
    (validation,), (other,) = alone[1], ranks.entries("r", "validation")
    assert other["loss"] == pytest.approx(validation["loss"], rel=1e-3)
    assert other["accuracy"] == pytest.approx(validation["accuracy"], abs=1.01 / 360)
    assert sum(map(sum, other["confusion"])) == 360


def _check_census(entries: list[dict[str, Any]]) -> None:
    assert len(entries) == 2
    for entry in entries:
        assert entry["seen"] == [1.0] * 257
        assert entry["count"] == 257
        assert entry["ids"] == 256 * 257 / 2


@pytest.mark.parametrize("loaded", ["false", "true"])
def test_each_validation_example_counts_once_on_one_process(here: Here, loaded: str) -> None:
    here.train(task=f"{_JOBS}:Census", fields={"loaded": loaded}, workers=0)
    _check_census(here.entries("validation"))


@pytest.mark.parametrize(
    ("loaded", "processes"),
    [
        ("false", 2),
        ("true", 3),
        pytest.param("false", 3, marks=pytest.mark.slow),
        pytest.param("true", 2, marks=pytest.mark.slow),
    ],
)
def test_each_validation_example_counts_once_on_several_processes(
    ranks: Ranks, here: Here, processes: int, loaded: str
) -> None:
    """Batches have 64 examples: 21, 21 and 22 on three processes."""
    words = ("--set", f"loaded={loaded}", "--workers", "1", "--device", "cpu", "--run", "several")
    ranks.train(processes, f"{_JOBS}:Census", *words)
    found = ranks.entries("several", "validation")
    _check_census(found)
    here.train(task=f"{_JOBS}:Census", fields={"loaded": loaded}, workers=0)
    losses = [
        [entry["loss"] for entry in entries] for entries in (found, here.entries("validation"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
