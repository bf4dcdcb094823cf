"""Losses that are not finite, once and for good, and one that leaps."""

import math
from pathlib import Path

import pytest
import torch

from tests.support.commands import Trainbox
from tests.support.faults import GATED, TASKS, messages

_SICK = (
    f"{TASKS}:Sick",
    *GATED[1:],
    "--checkpoint-steps",
    "10",
    "--keep",
    "99",
    "--skip-nonfinite",
    "3",
)


def _finite(folder: Path) -> list[int]:
    """The steps of the checkpoints, each of which holds finite numbers only."""
    paths = sorted((folder / "runs/r/checkpoints").glob("*.pt"))
    for path in paths:
        state = torch.load(path, weights_only=True)
        tensors = [
            *state["model"].values(),
            *(t for entry in state["optimizer"]["state"].values() for t in entry.values()),
        ]
        assert all(tensor.isfinite().all() for tensor in tensors), path
    return [int(path.stem.removeprefix("step-")) for path in paths]


@pytest.mark.parametrize("processes", ["1", pytest.param("2", marks=pytest.mark.slow)])
def test_row_24_one_loss_is_nan(trainbox: Trainbox, processes: str) -> None:
    """On one rank: all of them leave the step out, the entry counts it, and nothing of it stays."""
    ended = trainbox.train(*_SICK, "--processes", processes)
    assert (
        ended.out.count("step 50: the gradient is not finite, the step is skipped (1 so far)") == 1
    )
    entries = trainbox.entries("r", "train")
    assert [entry["step"] for entry in entries] == [step for step in range(1, 401) if step != 50]
    assert all(
        math.isfinite(entry["loss"]) and math.isfinite(entry["gradient_norm"]) for entry in entries
    )
    assert {entry.get("skipped_steps", 0) for entry in entries if entry["step"] > 50} == {1}
    assert _finite(trainbox.folder)[-1] == 400


def test_row_25_all_losses_are_nan(trainbox: Trainbox) -> None:
    ended = trainbox("train", *_SICK, "--set", "last=400")
    assert ended.code == 6
    assert len(messages(ended)) == 1
    assert "the gradient of 4 steps in a row is not finite by step 53: lower --lr" in ended.err
    assert ended.out.count("the step is skipped") == 3
    assert _finite(trainbox.folder)[-1] == 50
    # it starts from a finite state, and tells the same
    again = trainbox("train", *_SICK, "--set", "last=400")
    assert again.code == 6
    assert "from step 50, " in again.out


def test_row_26_a_loss_leaps(trainbox: Trainbox) -> None:
    ended = trainbox.train(*_SICK, "--set", "factor=10000")
    (line,) = [line for line in ended.out.splitlines() if "times the usual" in line]
    assert line.startswith("step 50: the loss ")
    assert "--clip-norm or a lower --lr" in line
