"""The effect of each training option on the numbers, in trainings of a few milliseconds."""

import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.support.here import Here
from tests.support.tiny import Tiny
from trainbox.errors import Failure
from trainbox.options.config import warmup_then_cosine
from trainer.loop.pace import Pace
from trainer.records.checkpoint import RunCheckpoints


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Return a list that gets the gradient's norm at each step of any optimizer."""
    norms: list[float] = []

    def note(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
        found = [
            p.grad
            for group in optimizer.param_groups
            for p in group["params"]
            if p.grad is not None
        ]
        norms.append(math.sqrt(sum(float(gradient.double().square().sum()) for gradient in found)))

    handle = register_optimizer_step_pre_hook(note)
    yield norms
    handle.remove()


def _by_hand(
    kind: Callable[..., torch.optim.Optimizer], steps: int, **options: Any
) -> dict[str, Tensor]:
    """Return the weights after a plain loop over the same data in the same order."""
    from trainbox.order import derive_seed
    from trainer.data.schedule import epoch_order

    task = Tiny()
    inputs, targets = task._examples(50, 1).tensors
    torch.manual_seed(derive_seed(0, "model"))
    model = task.build_model()
    optimizer = kind(model.parameters(), lr=0.05, **options)
    for step in range(steps):
        chosen = epoch_order(0, step // 6, 50)[step % 6 * 8 : step % 6 * 8 + 8]
        optimizer.param_groups[0]["lr"] = 0.05 * warmup_then_cosine(step, steps, 0)
        optimizer.zero_grad()
        (model(inputs[chosen]) - targets[chosen]).square().mean().backward()
        optimizer.step()
    return model.state_dict()


# fmt: off
_SETTINGS = [
    ({}, torch.optim.AdamW, {}),
    ({"weight_decay": 0.0}, torch.optim.AdamW, {"weight_decay": 0.0}),
    ({"optimizer": "adam"}, torch.optim.Adam, {}),
    ({"optimizer": "adamw", "weight_decay": 0.5}, torch.optim.AdamW, {"weight_decay": 0.5}),
    ({"optimizer": "adam", "weight_decay": 0.5}, torch.optim.Adam, {"weight_decay": 0.5}),
    ({"optimizer": "sgd"}, torch.optim.SGD, {"momentum": 0.9}),
    ({"optimizer": "sgd", "weight_decay": 0.1}, torch.optim.SGD,
     {"momentum": 0.9, "weight_decay": 0.1}),
]
# fmt: on


@pytest.mark.parametrize(("settings", "kind", "options"), _SETTINGS)
def test_the_requested_optimizer_and_weight_decay_are_used(
    here: Here,
    settings: dict[str, Any],
    kind: Callable[..., torch.optim.Optimizer],
    options: dict[str, Any],
) -> None:
    here.train(epochs=3, **settings)
    expected, found = _by_hand(kind, 18, **options), here.weights()
    assert found["forwards"] == 18
    for name in ("linear.weight", "linear.bias"):
        torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=1e-6)


def test_the_gradient_is_clipped_and_its_norm_before_is_logged(
    here: Here, gradients: list[float]
) -> None:
    here.train("free", max_steps=10, log_steps=1)
    free = list(gradients)
    assert [entry["gradient_norm"] for entry in here.entries("train", "free")] == pytest.approx(
        free, rel=1e-5
    )
    gradients.clear()
    limit = sorted(free)[5]
    here.train("clipped", max_steps=10, log_steps=1, clip_norm=limit)
    logged = [entry["gradient_norm"] for entry in here.entries("train", "clipped")]
    assert logged[0] == pytest.approx(free[0], rel=1e-5)
    assert max(logged) > limit
    assert gradients == pytest.approx([min(norm, limit) for norm in logged], rel=1e-4)
    assert max(gradients) <= limit * (1 + 1e-4)


def test_accumulation_changes_only_the_rounding(here: Here, gradients: list[float]) -> None:
    here.train("whole", log_steps=1)
    whole = list(gradients)
    gradients.clear()
    here.train("parts", log_steps=1, accumulation=3)
    assert gradients == pytest.approx(whole, rel=1e-4)
    for kind in ("train", "validation"):
        losses = [
            [entry["loss"] for entry in here.entries(kind, run)] for run in ("whole", "parts")
        ]
        assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert len(gradients) == 18


def test_the_logged_loss_is_the_mean_since_the_previous_entry(here: Here) -> None:
    here.train("each", log_steps=1)
    here.train("some", log_steps=4)
    each = {entry["step"]: entry["loss"] for entry in here.entries("train", "each")}
    entries = here.entries("train", "some")
    # An epoch of 6 steps ends with an entry, too.
    assert [entry["step"] for entry in entries] == [4, 6, 8, 12, 16, 18]
    before = 0
    for entry in entries:
        steps = range(before + 1, entry["step"] + 1)
        assert entry["loss"] == pytest.approx(
            sum(each[step] for step in steps) / len(steps), rel=1e-5
        )
        before = entry["step"]
    assert here.digest("some") == here.digest("each")


def test_the_learning_rate_warms_up_scales_and_falls(here: Here) -> None:
    here.train(
        epochs=3,
        warmup_epochs=0.5,
        log_steps=1,
        lr_scaling="linear",
        base_batch_size=16,
        learning_rate=0.1,
    )
    rates = [entry["learning_rate"] for entry in here.entries("train")]
    assert rates == pytest.approx([0.05 * warmup_then_cosine(step, 18, 3) for step in range(18)])
    assert rates[0] == pytest.approx(0.05 / 3)
    assert max(rates) == pytest.approx(0.05)


def test_bf16_trains_on_a_cpu(here: Here) -> None:
    here.train("fp32", epochs=30, eval_every=15)
    here.train("bf16", epochs=30, eval_every=15, precision="bf16")
    losses = {
        run: [entry["loss"] for entry in here.entries("validation", run)]
        for run in ("fp32", "bf16")
    }
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"][-1] < 0.2
    assert here.weights("bf16")["linear.weight"].dtype == torch.float32
    assert here.digest("bf16") != here.digest("fp32")


def test_after_early_stopping_the_same_command_does_not_resume(here: Here) -> None:
    # The loss falls, so `max:loss` never gets better.
    settings: dict[str, Any] = {"epochs": 9, "early_stopping": "max:loss", "patience": 2}
    out = here.train(**settings)
    assert [entry["step"] for entry in here.entries("validation")] == [6, 12, 18]
    assert "(ended early at step 18)" in out
    assert here.steps()[-1] == 18
    assert here.state(18)["progress"]["ended_early"] is True
    digest = here.digest()
    again = here.train(**settings)
    assert "this run is complete" in again
    assert "(ended early at step 18)" in again
    assert here.digest() == digest
    assert len(here.entries("validation")) == 3


def test_patience_continues_after_a_stop(here: Here) -> None:
    settings: dict[str, Any] = {"epochs": 9, "early_stopping": "max:loss", "patience": 3}
    here.stopped(14, **settings)
    assert here.state(14)["progress"]["patience_used"] == 1
    here.train(**settings)
    assert [entry["step"] for entry in here.entries("validation")] == [6, 12, 18, 24]


@pytest.mark.parametrize(("best_by", "best"), [(None, 18), ("max:loss", 6)])
def test_the_requested_metric_selects_the_best_checkpoint(
    here: Here, best_by: str | None, best: int
) -> None:
    out = here.train(best_by=best_by)
    values = {entry["step"]: entry["loss"] for entry in here.entries("validation")}
    assert f"loss {values[best]:.4f}, step {best}\n" in out
    assert out.count("(best)") == {18: 3, 6: 1}[best]
    sidecar = here.json(f"checkpoints/step-{best:08d}.json")
    assert sidecar["best_step"] == best
    assert sidecar["metrics"] == {"loss": values[best]}
    saved = here.state(best)["model"]
    exported = load_file(here.path() / "model.safetensors")
    assert all(exported[name].equal(saved[name]) for name in saved)
    assert int(exported["forwards"]) == best


@pytest.mark.parametrize(
    ("every", "steps"), [(1, [6, 12, 18, 24, 30]), (2, [12, 24, 30]), (9, [30])]
)
def test_validations_come_every_few_epochs_and_at_the_end(
    here: Here, every: int, steps: list[int]
) -> None:
    here.train(epochs=5, eval_every=every)
    assert [entry["step"] for entry in here.entries("validation")] == steps


@pytest.mark.parametrize(("max_steps", "validated"), [(6, [6]), (14, [6, 12, 14])])
def test_max_steps_may_end_within_an_epoch_and_are_validated(
    here: Here, max_steps: int, validated: list[int]
) -> None:
    out = here.train(max_steps=max_steps, log_steps=1)
    assert [entry["step"] for entry in here.entries("train")] == list(range(1, max_steps + 1))
    assert [entry["step"] for entry in here.entries("validation")] == validated
    assert here.steps()[-1] == max_steps
    assert f"steps      {max_steps}, 6 an epoch\n" in out


def test_checkpoints_come_every_few_steps(here: Here) -> None:
    here.train(checkpoint_steps=4, keep=99, best_by="max:loss")
    assert here.steps() == [4, 6, 8, 12, 16, 18]
    assert [here.state(step)["progress"]["step"] for step in here.steps()] == here.steps()


def test_checkpoints_come_every_few_minutes(here: Here) -> None:
    here.train(checkpoint_minutes=1e-9, keep=99, best_by="max:loss")
    assert here.steps() == list(range(1, 19))
    here.train("rare", checkpoint_minutes=1e9, keep=99, best_by="max:loss")
    assert here.steps("rare") == [6, 18]
    assert here.digest("rare") == here.digest()


# An epoch has 6 steps, and a log entry comes every 4 steps.
_STARTS = (1, 5, 6, 18)


def test_a_resume_from_any_step_has_the_same_weights_and_the_same_log(here: Here) -> None:
    settings: dict[str, Any] = {"log_steps": 4, "accumulation": 2, "early_stopping": "loss"}
    here.train("undisturbed", **settings)
    undisturbed = _digest_and_losses(here, "undisturbed")
    for start in _STARTS:
        run = f"from-{start}"
        here.stopped(start, run, **settings)
        assert here.steps(run)[-1] == start
        here.train(run, **settings)
        assert _digest_and_losses(here, run) == undisturbed, f"resumed from step {start}"


def _digest_and_losses(here: Here, run: str) -> tuple[str, list[tuple[int, float]]]:
    entries = [*here.entries("train", run), *here.entries("validation", run)]
    return here.digest(run), [(entry["step"], entry["loss"]) for entry in entries]


@pytest.mark.parametrize(("step", "log_steps"), [(1, 50), (9, 1), (18, 50)])
def test_a_loss_that_is_not_finite_exits_with_code_6_and_leaves_only_finite_checkpoints(
    here: Here, step: int, log_steps: int
) -> None:
    settings: dict[str, Any] = {"fields": {"nan_at": step}, "log_steps": log_steps, "keep": 99}
    settings |= {"checkpoint_steps": 1}
    with pytest.raises(Failure, match="not finite") as failure:
        here.train(**settings)
    assert failure.value.exit_code == 6
    cure = "was so before the first update: check the first weights" if step == 1 else "lower --lr"
    assert cure in str(failure.value)
    assert f"by step {step}:" in str(failure.value)
    assert here.steps() == list(range(1, step))
    for saved in here.steps():
        state = here.state(saved)
        assert all(tensor.isfinite().all() for tensor in state["model"].values())
        assert all(
            tensor.isfinite().all()
            for entry in state["optimizer"]["state"].values()
            for tensor in entry.values()
        )
    with pytest.raises(Failure, match="not finite"):  # the same command resumes and fails again
        here.train(**settings)


def test_a_running_save_is_finished_when_the_training_fails(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank exits without waiting for threads, which would lose a running save."""
    save, finish, failed = torch.save, RunCheckpoints.finish, threading.Event()

    def save_after_the_failure(*arguments: Any, **options: Any) -> None:
        assert failed.wait(60)
        save(*arguments, **options)

    def note_the_failure(checkpoints: RunCheckpoints) -> None:
        failed.set()
        finish(checkpoints)

    monkeypatch.setattr(torch, "save", save_after_the_failure)
    monkeypatch.setattr(RunCheckpoints, "finish", note_the_failure)
    with pytest.raises(Failure, match="not finite"):
        here.train(fields={"nan_at": 4}, checkpoint_steps=3, log_steps=1)
    assert here.saving == []
    assert here.steps() == [3]


def test_fast_trains_without_deterministic_algorithms(here: Here) -> None:
    here.train("exact")
    assert torch.get_deterministic_debug_mode() == 2
    assert not torch.backends.cudnn.benchmark
    out = here.train("fast", deterministic=False)
    assert torch.get_deterministic_debug_mode() == 0
    assert torch.backends.cudnn.benchmark
    assert "precision  fp32, fast, " in out
    losses = [here.entries("validation", run)[-1]["loss"] for run in ("exact", "fast")]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    torch.backends.cudnn.benchmark = False


def test_a_checkpoint_that_falls_due_before_a_validation_is_not_lost(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several ranks learn the result of a vote at the next vote, here in the validation."""
    votes = [(False, False)]  # stop, save

    def one_later(_pace: Pace, stop: bool, save: bool) -> tuple[bool, bool]:
        votes.append((stop, save))
        return votes[-2]

    checks = iter(range(1, 99))
    monkeypatch.setattr(Pace, "vote", one_later)
    # The check after step 12 is due, at the end of the second epoch.
    monkeypatch.setattr(RunCheckpoints, "due", lambda _self, _minutes: next(checks) == 12)
    here.train(max_steps=18, best_by="max:loss", keep=99)  # never better than the first time
    assert here.steps() == [6, 13, 18]
