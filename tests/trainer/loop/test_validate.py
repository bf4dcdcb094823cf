"""What follows a validation."""

import dataclasses
import itertools
import os
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from safetensors import safe_open
from torch import Tensor

from tests.support.here import Here
from trainbox.errors import Failure
from trainer.loop import evaluate, validate
from trainer.loop.state import Job
from trainer.records import checkpoint
from trainer.records.run_log import RunLog


def test_a_training_ends_after_as_many_validations_without_progress_as_its_patience(
    here: Here,
) -> None:
    losses = iter([3.0, 4.0, 2.0, 2.0, 3.0, 1.0])
    here.plant(metrics=lambda *_: {"loss": next(losses)})
    here.train(epochs=6, early_stopping="min:loss", patience=2)
    assert [entry["loss"] for entry in here.entries("validation")] == [3, 4, 2, 2, 3]
    progress = here.state(30)["progress"]  # the last step has a checkpoint
    assert (progress["best_step"], progress["ended_early"]) == (18, True)


@pytest.fixture
def best_is_third(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the third validation be the best of all, and the second better than the first."""
    by_step = {6: 5.0, 12: 4.0, 18: 3.0}
    found_by = validate.evaluate

    def evaluated(job: Job, *arguments: Any, **options: Any) -> Any:
        loss = by_step.get(job.state.progress.step, 4.0)
        found = found_by(job, *arguments, **options)
        return dataclasses.replace(found, metrics={"loss": loss})

    monkeypatch.setattr(validate, "evaluate", evaluated)


def _best(here: Here) -> tuple[str, Tensor]:
    with safe_open(here.path() / "model.safetensors", "pt") as file:
        return file.metadata()["step"], file.get_tensor("linear.weight")


@pytest.mark.usefixtures("best_is_third")
@pytest.mark.parametrize(("every_s", "steps"), [(0.0, [6, 12, 18, 30]), (3600.0, [6, 18, 30])])
def test_a_best_that_follows_soon_is_written_with_the_next_checkpoint(
    here: Here, monkeypatch: pytest.MonkeyPatch, every_s: float, steps: list[int]
) -> None:
    monkeypatch.setattr(checkpoint, "_BEST_EVERY_S", every_s)
    here.train(epochs=5, keep=9)
    assert here.steps() == steps
    assert here.state(30)["progress"]["best_step"] == 18
    step, weight = _best(here)
    assert step == "18" and here.state(18)["model"]["linear.weight"].equal(weight)
    assert [entry["step"] for entry in here.digests() if entry["kind"] == "checkpoint"] == steps


@pytest.mark.usefixtures("best_is_third")
@pytest.mark.parametrize(
    ("end", "steps"), [("stop", [6, 18, 20]), ("error", [6, 18]), ("checkpoint", [6, 18, 20])]
)
def test_a_training_that_ends_after_a_new_best_has_written_it(
    here: Here, monkeypatch: pytest.MonkeyPatch, end: str, steps: list[int]
) -> None:
    monkeypatch.setattr(checkpoint, "_BEST_EVERY_S", 3600.0)
    if end == "stop":
        here.stopped(20, epochs=5)
    elif end == "error":
        with pytest.raises(Failure, match=r"not finite by step 20: .* \(best: step 18\)"):
            here.train(epochs=5, log_steps=1, fields={"nan_at": 20})
    else:
        monkeypatch.setattr(RunLog, "advance", _killed_at(22))
        if not (pid := os.fork()):
            here.train(epochs=5, checkpoint_steps=20)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert here.steps() == steps
    assert _best(here)[0] == "18"
    monkeypatch.undo()


@pytest.mark.usefixtures("best_is_third")
def test_a_best_that_a_crash_has_lost_is_found_again(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_BEST_EVERY_S", 3600.0)
    here.train("whole", epochs=5)
    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "advance", _killed_at(20))
        if not (pid := os.fork()):
            here.train(epochs=5)
        assert os.waitpid(pid, 0)[1] == signal.SIGKILL
    assert (here.steps(), _best(here)[0]) == ([6], "6")
    here.train(epochs=5)
    assert _best(here)[0] == "18"
    assert "SAME BITS" in here.succeeds("verify", "runs/r", "runs/whole")


def test_the_statistics_of_all_batches_are_read_at_once(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each read of a GPU would wait for its work."""
    reads, cpu, add_up = [0], Tensor.cpu, evaluate.add_up

    def counted(tensor: Tensor) -> Tensor:
        reads[0] += 1
        return cpu(tensor)

    def counting(*arguments: Any, **options: Any) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "cpu", counted)
            return add_up(*arguments, **options)

    monkeypatch.setattr(evaluate, "add_up", counting)
    here.train(epochs=1)  # the validation has three batches of two statistics
    assert reads == [1]


def _killed_at(step: int) -> Callable[[RunLog], None]:
    """Return a method `advance` that kills the process after this step, and after its saves."""
    advance, steps = RunLog.advance, itertools.count(1)

    def advanced(run: RunLog) -> None:
        advance(run)
        if next(steps) == step:
            for thread in threading.enumerate():
                if thread.name == "checkpoint":
                    thread.join()
            os.kill(os.getpid(), signal.SIGKILL)

    return advanced


@pytest.mark.parametrize(("count", "end"), [(5, "m5 5.0000"), (6, "m5 5.0000, ...")])
def test_the_line_of_a_validation_has_six_metrics(here: Here, count: int, end: str) -> None:
    metrics = {"loss": 0.0} | {f"m{number}": float(number) for number in range(1, count + 1)}
    here.plant(metrics=lambda *_: metrics)
    out = here.train(epochs=1)
    assert f"epoch 1: loss 0.0000, m1 1.0000, m2 2.0000, m3 3.0000, m4 4.0000, {end} (best)" in out


def test_the_speed_does_not_include_the_validations(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    now_s, advance = [0.0], RunLog.advance

    def metrics(*_: object) -> dict[str, float]:
        now_s[0] += 1000
        return {"loss": 1.0}

    def advanced(run: RunLog) -> None:
        now_s[0] += 0.5
        advance(run)

    monkeypatch.setattr("trainer.loop.state.time", SimpleNamespace(monotonic=lambda: now_s[0]))
    here.plant(metrics=metrics)
    monkeypatch.setattr(RunLog, "advance", advanced)
    here.train()
    assert [entry["samples_per_second"] for entry in here.entries("train")] == [16.0] * 3
