"""examples/ddp has the same bits after kills, and resumes on another number of processes."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.commands import logged, wait_until
from tests.support.ranks import Ranks
from tests.support.scripts import Scripts, wait_for_handlers
from trainbox.files.sidecar import steps_in

_CODE = (Path(__file__).parents[2] / "examples/ddp/train.py").read_text(encoding="utf-8")
_STEPS_PER_EPOCH = 100


@pytest.fixture
def scripts(ranks: Ranks, tmp_path: Path) -> Iterator[Scripts]:
    scripts = Scripts(tmp_path, ranks)
    yield scripts
    scripts.close()


def _newest(scripts: Scripts) -> int:
    return max(steps_in(scripts.run / "checkpoints"), default=0)


def _interrupt(scripts: Scripts, processes: int, number: signal.Signals) -> list[int]:
    """Send a signal to the last rank when the script has saved again; return the exit codes."""
    started, before = scripts.start(processes, _CODE, "--epochs", "1000000"), _newest(scripts)
    wait_until(lambda: _newest(scripts) > before, started)
    wait_for_handlers(started, processes)  # the resume may have finished the save before
    if number == signal.SIGKILL:
        scripts.kill(started)
    else:
        os.kill(started.pids()[-1], number)
    return started.codes()


def _finish(scripts: Scripts, processes: int, epochs: int) -> dict[str, torch.Tensor]:
    started = scripts.start(processes, _CODE, "--epochs", str(epochs))
    assert started.codes() == [0] * processes
    assert started.output() == f"finished {epochs * _STEPS_PER_EPOCH} steps in {scripts.run}\n"
    weights: dict[str, torch.Tensor] = torch.load(scripts.run / "model.pt")
    return weights


def test_a_short_training_finishes(scripts: Scripts) -> None:
    started = scripts.start(1, _CODE, "--epochs", "1", "--batch-size", "960")
    assert started.codes() == [0]
    assert started.output() == f"finished 10 steps in {scripts.run}\n"
    assert _newest(scripts) == 10


@pytest.mark.slow
@pytest.mark.parametrize("processes", [1, 2])
def test_a_kill_and_a_stop_change_no_bit(scripts: Scripts, processes: int) -> None:
    assert _interrupt(scripts, processes, signal.SIGKILL) == [-signal.SIGKILL] * processes
    assert _interrupt(scripts, processes, signal.SIGTERM) == [75] * processes
    epochs = _newest(scripts) // _STEPS_PER_EPOCH + 1
    resumed = _finish(scripts, processes, epochs)
    scripts.run = scripts.folder / "undisturbed"
    undisturbed = _finish(scripts, processes, epochs)
    assert all(torch.equal(resumed[name], undisturbed[name]) for name in undisturbed)
    assert resumed.keys() == undisturbed.keys()
    assert max(value["accuracy"] for value in logged(scripts.run, "validation")) > 0.9


@pytest.mark.slow
def test_two_processes_resume_on_one(scripts: Scripts) -> None:
    assert _interrupt(scripts, 2, signal.SIGTERM) == [75, 75]
    stopped_at = _newest(scripts)
    epochs = max(5, stopped_at // _STEPS_PER_EPOCH + 1)
    _finish(scripts, 1, epochs)
    steps = [entry["step"] for entry in logged(scripts.run, "train")]
    assert steps == list(range(20, epochs * _STEPS_PER_EPOCH + 1, 20))
    assert logged(scripts.run, "validation")[-1]["accuracy"] > 0.97
