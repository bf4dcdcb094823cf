"""Losses that are not finite, once or for the rest of the run, and a loss that leaps."""

import math
from pathlib import Path

import pytest
import torch

from tests.support.faults import GATED, TASKS, messages
from tests.support.ranks import Ranks

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
    """Return the steps of the checkpoints; fail if one contains a number that is not finite."""
    paths = sorted((folder / "runs/r/checkpoints").glob("*.pt"))
    for path in paths:
        state = torch.load(path, weights_only=True)
        tensors = [
            *state["model"].values(),
            *(t for entry in state["optimizer"]["state"].values() for t in entry.values()),
        ]
        assert all(tensor.isfinite().all() for tensor in tensors), path
    return [int(path.stem.removeprefix("step-")) for path in paths]


@pytest.mark.parametrize("processes", [1, 2])
def test_row_24_one_loss_is_nan(ranks: Ranks, processes: int) -> None:
    """If the loss is NaN on one rank, all ranks skip the step, and the log counts it."""
    ended = ranks.train(processes, *_SICK, "--max-steps", "120")
    assert (
        ended.out.count("step 50: the gradient is not finite, the step is skipped (1 so far)") == 1
    )
    entries = ranks.entries("r", "train")
    assert [entry["step"] for entry in entries] == [step for step in range(1, 121) if step != 50]
    assert all(
        math.isfinite(entry["loss"]) and math.isfinite(entry["gradient_norm"]) for entry in entries
    )
    assert {entry.get("skipped_steps", 0) for entry in entries if entry["step"] > 50} == {1}
    assert _finite(ranks.folder)[-1] == 120


def test_row_25_all_losses_are_nan(ranks: Ranks) -> None:
    ended = ranks(1, "train", *_SICK, "--set", "last=400")
    assert ended.codes == [6]
    (message,) = messages(ended)
    assert "the gradient of 4 steps in a row is not finite by step 53: lower --lr" in message
    assert ended.out.count("the step is skipped") == 3
    assert _finite(ranks.folder)[-1] == 50
    # The next start resumes from a finite state and fails in the same way.
    again = ranks(1, "train", *_SICK, "--set", "last=400")
    assert again.codes == [6]
    assert "from step 50, " in again.out


def test_row_26_a_loss_leaps(ranks: Ranks) -> None:
    ended = ranks.train(1, *_SICK, "--set", "factor=10000")
    (line,) = [line for line in ended.out.splitlines() if "times the usual" in line]
    assert line.startswith("step 50: the loss ")
    assert "--clip-norm or a lower --lr" in line
