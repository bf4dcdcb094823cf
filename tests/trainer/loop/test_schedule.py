"""The schedule of a task: epochs, validations, and torch's own schedulers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch
from torch.optim import lr_scheduler

import trainbox
from tests.support.here import Here
from tests.support.ranks import Ranks
from tests.support.tiny import Tiny
from trainbox.errors import Failure, WrongUse


def _rates(scheduler: Any, values: Sequence[Any], **options: Any) -> list[float]:
    """Return torch's own learning rates, divided by the first one, 0.3."""
    optimizer = torch.optim.SGD([torch.zeros(())], lr=0.3, momentum=0.9)
    used = scheduler(optimizer, **options)
    optimizer.step()
    rates = [optimizer.param_groups[0]["lr"] / 0.3]
    for value in values:
        used.step(*value)
        rates.append(optimizer.param_groups[0]["lr"] / 0.3)
    return rates


@pytest.mark.parametrize(
    ("scheduler", "options"),
    [
        (lr_scheduler.StepLR, {"step_size": 7, "gamma": 0.5}),
        (lr_scheduler.MultiStepLR, {"milestones": [5, 9]}),
        (lr_scheduler.CosineAnnealingLR, {"T_max": 20}),
        (lr_scheduler.LinearLR, {"total_iters": 4}),
    ],
)
def test_a_factor_is_that_of_torchs_scheduler(scheduler: Any, options: dict[str, Any]) -> None:
    expected = _rates(scheduler, [()] * 20, **options)
    order = [*range(21), 3, 20, 0]
    found = [trainbox.scheduler_factor(scheduler, at + 0.5, **options) for at in order]
    assert found == pytest.approx([expected[at] for at in order], rel=1e-12)


def test_the_factor_of_one_cycle_rises_to_the_largest_rate() -> None:
    expected = _rates(lr_scheduler.OneCycleLR, [()] * 20, max_lr=0.3, total_steps=21)
    one_cycle = lr_scheduler.OneCycleLR
    found = [
        trainbox.scheduler_factor(one_cycle, at, max_lr=1.0, total_steps=21) for at in range(21)
    ]
    assert found == pytest.approx(expected, rel=1e-12)
    assert 0.99 < max(found) <= 1


def test_the_factor_of_a_plateau_follows_the_metrics() -> None:
    values = [1.0, 0.9, 0.95, 0.91, 0.5, 0.6, 0.7, 0.8, 0.9]
    expected = _rates(lr_scheduler.ReduceLROnPlateau, [(v,) for v in values], patience=1)
    for order in (range(10), range(9, -1, -1)):
        for count in order:
            found = trainbox.scheduler_factor(
                lr_scheduler.ReduceLROnPlateau, values[:count], patience=1
            )
            assert found == pytest.approx(expected[count], rel=1e-6)
    # The metrics of another training do not mix with these.
    other = trainbox.scheduler_factor(lr_scheduler.ReduceLROnPlateau, [0.1] * 4, patience=1)
    assert other == pytest.approx(0.1)
    assert expected[-1] < 0.011


def _sequential(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
    both = [lr_scheduler.ConstantLR(optimizer, 0.1), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    return lr_scheduler.SequentialLR(optimizer, both, milestones=[2])


def test_a_function_builds_several_schedulers() -> None:
    expected = _rates(_sequential, [()] * 5)
    assert expected[0] == pytest.approx(0.1)
    found = [trainbox.scheduler_factor(_sequential, at) for at in range(6)]
    assert found == pytest.approx(expected)


_OPTIMIZER = torch.optim.SGD([torch.zeros(1)], lr=1.0)
_STEP = lr_scheduler.StepLR(_OPTIMIZER, 3)
_PLATEAU = lr_scheduler.ReduceLROnPlateau


@pytest.mark.parametrize(
    ("scheduler", "at", "options", "text"),
    [
        (_STEP, 1, {}, "got 'StepLR', which is no class of a scheduler: give the class and its"),
        ("StepLR", 1, {"step_size": 3}, "got 'StepLR', which is no class of a scheduler"),
        (_OPTIMIZER, 1, {}, "got 'SGD', which is no class of a scheduler"),
        (torch.optim.SGD, 1, {}, "which is no class of a scheduler"),
        (None, 1, {}, "got 'NoneType', which is no class of a scheduler"),
        (type(_STEP), 1, {"optimizer": _OPTIMIZER}, "got an optimizer, and has one of its own: d"),
        (type(_STEP), 1, {}, "cannot build StepLR (StepLR.__init__() missing 1 required posit"),
        (type(_STEP), 1, {"size": 3}, "cannot build StepLR (StepLR.__init__() got an unexpected"),
        (type(_STEP), [0.5], {"step_size": 3}, "got list instead of the number of steps: write "
         "scheduler_factor(StepLR, step, ...)"),
        (_PLATEAU, 3, {}, "got int instead of the metric of each validation: write "
         "scheduler_factor(ReduceLROnPlateau, [each['loss'] for each in validations], ...)"),
        (_PLATEAU, [{"loss": 0.5}], {}, "got list instead of the metric of each validation"),
        (lr_scheduler.SequentialLR, 1, {"schedulers": [_STEP], "milestones": []}, "cannot build "),
    ],
)  # fmt: skip
def test_a_wrong_use_of_a_scheduler_names_the_cure(
    scheduler: Any, at: Any, options: dict[str, Any], text: str
) -> None:
    with pytest.raises(WrongUse) as refused:
        trainbox.scheduler_factor(scheduler, at, **options)
    assert str(refused.value).startswith("scheduler_factor ")
    assert text in str(refused.value)


@dataclass(frozen=True)
class Steps(Tiny):
    """Has a tenth of the learning rate after each epoch, as StepLR."""

    def schedule(
        self, step: int, total_steps: int, warmup_steps: int, epoch: float, validations: Any
    ) -> float:
        return 0.1 ** (epoch // 1)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Plateau(Tiny):
    """Halves the learning rate when the loss of the validation has not become smaller."""

    learning_rate: ClassVar[float] = 0.5
    optimizer: ClassVar[str] = "sgd"
    metric: str = "loss"

    def schedule(
        self, step: int, total_steps: int, warmup_steps: int, epoch: float, validations: Any
    ) -> float:
        losses = [each[self.metric] for each in validations]
        return trainbox.scheduler_factor(
            lr_scheduler.ReduceLROnPlateau, losses, factor=0.5, patience=0
        )


def test_a_schedule_counts_epochs(here: Here) -> None:
    here.train(task=f"{__name__}:Steps", log_steps=3)
    rates = [entry["learning_rate"] for entry in here.entries("train")]
    assert rates == pytest.approx([0.05, 0.05, 0.005, 0.005, 0.0005, 0.0005])


def _expected(here: Here, run: str = "r") -> list[float]:
    """Return torch's learning rate of each epoch for the recorded validations of a run."""
    losses = [(entry["loss"],) for entry in here.entries("validation", run)]
    options = {"factor": 0.5, "patience": 0}
    return [0.5 * x for x in _rates(lr_scheduler.ReduceLROnPlateau, losses, **options)[:-1]]


def test_a_plateau_of_the_validation_lowers_the_learning_rate_also_after_a_resume(
    here: Here,
) -> None:
    settings: dict[str, Any] = {"task": f"{__name__}:Plateau", "epochs": 8, "log_steps": 6}
    here.train("whole", **settings, rehearses=True)
    rates = [entry["learning_rate"] for entry in here.entries("train", "whole")]
    assert rates == pytest.approx(_expected(here, "whole"))
    assert len({*rates}) > 2
    here.stopped(27, "stopped", **settings)
    here.train("stopped", **settings)
    assert here.digest("stopped") == here.digest("whole")


def test_a_plateau_has_the_same_bits_on_two_ranks(ranks: Ranks) -> None:
    words = (f"{__name__}:Plateau", "--shards", "2", "--epochs", "6")
    one, two = ranks.train(1, *words, "--run", "one"), ranks.train(2, *words, "--run", "two")
    assert one.digest == two.digest


def test_a_metric_that_does_not_exist_is_found_before_the_training(here: Here) -> None:
    fields = {"metric": "los"}
    with pytest.raises((Failure, WrongUse), match=r"schedule\(\) raised KeyError: 'los'"):
        here.train(task=f"{__name__}:Plateau", fields=fields, rehearses=True)
