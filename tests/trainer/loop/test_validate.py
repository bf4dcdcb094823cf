"""What follows a validation."""

from types import SimpleNamespace

import pytest

from tests.support.here import Here
from tests.support.tiny import Tiny
from trainer.run.run_log import RunLog


def test_a_training_ends_after_as_many_validations_without_progress_as_its_patience(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 4.0, 2.0, 2.0, 3.0, 1.0])
    monkeypatch.setattr(Tiny, "metrics", lambda *_: {"loss": next(losses)})
    here.train(epochs=6, early_stopping="min:loss", patience=2)
    assert [entry["loss"] for entry in here.entries("validation")] == [3, 4, 2, 2, 3]
    progress = here.state(30)["progress"]  # the last step has a checkpoint
    assert (progress["best_step"], progress["ended_early"]) == (18, True)


@pytest.mark.parametrize(("count", "end"), [(5, "m5 5.0000"), (6, "m5 5.0000, ...")])
def test_the_line_of_a_validation_has_six_metrics(
    here: Here, monkeypatch: pytest.MonkeyPatch, count: int, end: str
) -> None:
    metrics = {"loss": 0.0} | {f"m{number}": float(number) for number in range(1, count + 1)}
    monkeypatch.setattr(Tiny, "metrics", lambda *_: metrics)
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
    monkeypatch.setattr(Tiny, "metrics", metrics)
    monkeypatch.setattr(RunLog, "advance", advanced)
    here.train()
    assert [entry["samples_per_second"] for entry in here.entries("train")] == [16.0] * 3
