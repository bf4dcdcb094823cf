"""Advice about a training, in its header and at its end."""

import copy
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from tests.support.here import Here
from tests.support.tiny import TINY, Tiny
from trainbox import Classification
from trainbox.options.config import Settings
from trainer.data.schedule import Schedule
from trainer.loop import report
from trainer.loop.advice import advice_after, advice_before

_NAMES = ("cat", "dog")


def _training(*losses: float, **other: float) -> list[dict[str, Any]]:
    return [
        {"kind": "train", "step": step, "loss": loss, **other}
        for step, loss in enumerate(losses, 1)
    ]


def _validation(confusion: list[list[int]], step: int = 8) -> dict[str, Any]:
    right = sum(row[index] for index, row in enumerate(confusion))
    accuracy = right / sum(map(sum, confusion))
    return {"kind": "validation", "step": step, "accuracy": accuracy, "confusion": confusion}


@pytest.mark.parametrize(
    ("losses", "text"),
    [
        ([1, 1, 1, 1, 1, 1, 1, 3, 3], "the training loss grew from 1 to 3: use a lower --lr"),
        ([1, 1, 9, 1, 1, 1, 1, 1, 1], ""),  # a spike
        ([1, 1, 1, 1, 1, 1, 1, 1.05, 1.05], ""),
        ([1, 3], ""),  # too few entries
        ([-3, -3, -3, -3, -1, -1, -1, -1], ""),  # a bound, whose zero means nothing
    ],
)
def test_a_loss_that_grew(losses: list[float], text: str) -> None:
    assert advice_after(_training(*losses), 1, ()) == ([text] if text else [])


def test_losses_with_several_parts_may_grow() -> None:
    """Such as the losses of a generator and a discriminator."""
    assert advice_after(_training(*range(1, 9), loss_generator=1.0), 1, ()) == []


@pytest.mark.parametrize(
    ("confusion", "is_chance"),
    [
        ([[6, 0], [4, 0]], True),
        ([[3, 3], [2, 2]], True),
        ([[5, 1], [1, 3]], False),
        ([[1, 5], [0, 10]], False),  # better, although the classes differ in size
    ],
)
def test_an_accuracy_no_better_than_one_answer(confusion: list[list[int]], is_chance: bool) -> None:
    found = advice_after([_validation(confusion)], 8, _NAMES)
    assert len(found) == is_chance
    assert all("of the answer 'cat' for all examples: check the labels" in line for line in found)


def test_a_training_of_less_than_an_epoch_is_not_judged() -> None:
    assert advice_after([_validation([[6, 0], [4, 0]])], 9, _NAMES) == []


class Chance(Classification):
    """Labels that have nothing to do with the inputs."""

    epochs: ClassVar[int] = 1
    batch_size: ClassVar[int] = 8
    class_names: ClassVar[tuple[str, ...]] = _NAMES

    def train_dataset(self, data_dir: Any) -> TensorDataset:
        return TensorDataset(torch.zeros(15, 4), torch.zeros(15, dtype=torch.int64))

    def validation_dataset(self, data_dir: Any) -> TensorDataset:
        return TensorDataset(torch.zeros(10, 4), torch.tensor([0, 0, 0, 0, 0, 0, 1, 1, 1, 1]))

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 2)


def test_a_training_prints_its_advice(here: Here) -> None:
    out = here.train(task=f"{__name__}:Chance", batch_size=8)
    begin, _, end = out.partition("\nbest ")
    assert "no training example has the label of dog (1 of 2 classes)" in begin
    assert (
        "note       each epoch leaves out its last, incomplete batch of 7 of 15 training "
        "examples: --batch-size 7 leaves out 1\n"
    ) in begin
    assert "note       the accuracy 0.6000 is no better than the accuracy 0.6000 of the" in end


def _before(task: Any, model: nn.Module | None = None, **settings: Any) -> list[str]:
    model = nn.Linear(4, 1) if model is None else model
    optimizer = torch.optim.SGD(model.parameters())
    schedule = Schedule(0, 16, 8, 2, ())
    train = task.train_dataset(None)
    return advice_before(schedule, model, optimizer, task, Settings(**settings), train)


class _Listed(nn.Module):
    def __init__(self, layers: Any) -> None:
        super().__init__()
        self.layers, self.last = layers, nn.Linear(4, 1)


@pytest.mark.parametrize(
    ("layers", "kind"),
    [
        ([nn.Linear(4, 4)], "nn.ModuleList"),
        ({"a": nn.Linear(4, 4)}, "nn.ModuleDict"),
        ([nn.Parameter(torch.ones(3))], "nn.ParameterList"),
        ({"a": torch.ones(3, requires_grad=True)}, "nn.ParameterDict"),
        (nn.ModuleList([nn.Linear(4, 4)]), ""),
        (nn.ParameterList([torch.ones(3)]), ""),
        ([4, "relu", torch.ones(3)], ""),
        # They have nothing to train or to save.
        ({"ce": nn.CrossEntropyLoss(), "mse": nn.MSELoss()}, ""),
        ([nn.ReLU(), nn.Sequential(nn.Tanh(), nn.Flatten())], ""),
        ([nn.ReLU(), nn.BatchNorm1d(4)], "nn.ModuleList"),
    ],
)
def test_weights_in_a_plain_list(layers: Any, kind: str) -> None:
    what = "modules" if "Module" in kind else "tensors"
    text = f"the {what} in _Listed.layers are neither trained nor saved: use "
    found = _before(Tiny(), nn.Sequential(_Listed(layers), _Listed(layers)))
    assert found == ([f"{text}{kind} if they should be"] if kind else [])


def test_dropout_in_a_plain_list() -> None:
    """The mode of the model does not reach it."""
    dropout = nn.Sequential(nn.ReLU(), nn.Dropout2d())
    assert _before(Tiny(), _Listed([dropout])) == [
        "the modules in _Listed.layers also drop activations in a validation: use nn.ModuleList"
    ]
    assert _before(Tiny(), _Listed(nn.ModuleList([dropout]))) == []


@pytest.mark.parametrize(
    ("tensor", "is_lost"),
    [
        (torch.ones(3, requires_grad=True), True),
        (torch.ones(3), False),
        (torch.ones(3, requires_grad=True) * 2, False),  # computed from another tensor
        (nn.Parameter(torch.ones(3)), False),
    ],
)
def test_a_weight_that_is_no_parameter(tensor: Tensor, is_lost: bool) -> None:
    text = "the tensor _Listed.layers is neither trained nor saved: use nn.Parameter if it should"
    assert _before(Tiny(), _Listed(tensor)) == ([f"{text} be"] if is_lost else [])


def test_parameters_in_no_optimizer() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.Adam(model[2].parameters())
    train = TensorDataset(torch.zeros(16, 8))
    arguments = (model, optimizer, Tiny(), Settings(), train)
    assert advice_before(Schedule(0, 16, 8, 2, ()), *arguments) == [
        "72 of 99 parameters with requires_grad are in no optimizer, first 0.weight: give them "
        "to an optimizer in build_optimizer(), or set requires_grad to False"
    ]
    model[0].requires_grad_(False)
    assert advice_before(Schedule(0, 16, 8, 2, ()), *arguments) == []


@pytest.mark.parametrize(
    ("labels", "missing"),
    [
        ([0] * 6, "b, c, d, ... (4 of 5 classes)"),
        ([0, 2, 3, 4], "b (1 of 5 classes)"),
        ([0, 1, 2, 3, 4], ""),
        ([0, 1, 5], ""),  # which is refused
    ],
)
def test_classes_without_a_training_example(labels: list[int], missing: str) -> None:
    class Five(Chance):
        class_names: ClassVar[tuple[str, ...]] = ("a", "b", "c", "d", "e")

        def train_dataset(self, data_dir: Any) -> TensorDataset:
            return TensorDataset(torch.zeros(len(labels), 4), torch.tensor(labels))

    text = f"no training example has the label of {missing}: check the labels, such as a split of"
    assert _before(Five()) == ([f"{text} sorted examples"] if missing else [])


class _Own(Tiny):
    """Reads the rate of its optimizer, and no argument of schedule() but the step."""

    def build_optimizer(
        self, model: nn.Module, name: str, learning_rate: float, weight_decay: float | None
    ) -> torch.optim.Optimizer:
        groups = [{"params": [p], "lr": learning_rate * 2} for p in model.parameters()]
        return torch.optim.SGD(groups, lr=0.1)

    def schedule(self, step: int, *others: Any) -> float:
        return 1 / (1 + step)


class _Fixed(Tiny):
    learning_rate: ClassVar[float] = 0.5

    def build_optimizer(self, model: nn.Module, name: str, rate: float, decay: float | None) -> Any:
        return [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]

    def schedule(self, step: int, total: int, warmup: int, epoch: float, found: Any) -> float:
        return max(0.0, 1 - step / total)


class _Closure(Tiny):
    def build_optimizer(self, model: nn.Module, name: str, rate: float, decay: float | None) -> Any:
        return [lambda: (rate, decay)]


_OF_FIXED = "build_optimizer() of _Fixed does not read its argument"


@pytest.mark.parametrize(
    ("task", "changed", "advice"),
    [
        (Tiny(), {"patience": 3}, "--patience 3 has no effect without --early-stopping METRIC"),
        (Tiny(), {"patience": 3, "early_stopping": "loss"}, ""),
        (Tiny(), {"base_batch_size": 8}, "--base-batch-size 8 has no effect without --lr-scaling"),
        (Tiny(), {"learning_rate": 0.2, "weight_decay": 0.1, "warmup_epochs": 0.5}, ""),
        (_Own(), {"learning_rate": 0.2}, ""),
        (_Own(), {"weight_decay": 0.1}, "--weight-decay 0.1 has no effect: build_optimizer() of"),
        (_Own(), {"warmup_epochs": 2}, ""),  # *others
        (_Fixed(), {"learning_rate": 0.2}, f"--lr 0.2 has no effect: {_OF_FIXED} learning_rate"),
        (_Fixed(), {"learning_rate": 0.5}, ""),  # its own
        (_Fixed(), {"warmup_epochs": 1}, "--warmup-epochs 1 has no effect: schedule() of _Fixed"),
        (_Closure(), {"learning_rate": 0.2, "weight_decay": 1.0}, ""),
    ],
)
def test_a_setting_without_effect(task: Tiny, changed: dict[str, Any], advice: str) -> None:
    found = _before(task, **changed)
    assert len(found) == bool(advice)
    assert all(line.startswith(advice) for line in found)


_OTHERS = ("min:loss", "max:accuracy", "max:val_F1")


@pytest.mark.parametrize(
    ("changed", "advice"),
    [
        ({"best_by": "max:loss"}, "--best-by max:loss takes the highest loss for the best one"),
        ({"best_by": "min:accuracy"}, "--best-by min:accuracy takes the lowest accuracy for the"),
        ({"early_stopping": "min:val_F1"}, "--early-stopping min:val_F1 takes the lowest val_F1"),
        ({"best_by": "min:rmse", "early_stopping": "max:accuracy"}, ""),
        ({"best_by": "max:score", "early_stopping": "min:score"}, ""),
        ({"best_by": "max:neg_mean_squared_error"}, ""),
        ({"best_by": "max:recall_cancer", "early_stopping": "max:f1_flower"}, ""),
        ({"best_by": "RMSE"}, ""),
        ({"warmup_epochs": 2}, "--warmup-epochs 2 is not below the 1 epoch(s) of the training, so"),
        ({"warmup_epochs": 0.5}, ""),
    ],
)
def test_a_doubtful_setting(changed: dict[str, Any], advice: str) -> None:
    found = _before(Tiny(), **changed)
    assert [line.startswith(advice) for line in found] == ([True] if advice else [])
    assert not advice or found[0].endswith((": use less", *(f"use {d}" for d in _OTHERS)))


class _Clips(Tiny):
    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        found = super().losses(model, batch)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return found


class _ClipsACopy(Tiny):
    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        copy.deepcopy(model)(batch[0]).sum().backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return super().losses(model, batch)


def test_a_warm_up_that_ends_at_the_learning_rate_is_no_schedule_of_rates(here: Here) -> None:
    """The factor of the last of 5 steps is 5 / 10, and the learning rate is 0.5."""
    words = {"learning_rate": 0.5, "max_steps": 5, "batch_size": 5, "warmup_epochs": 1.0}
    assert "schedule() returns" not in here.train(rehearses=True, **words)


def test_a_gradient_that_is_clipped_before_there_is_one() -> None:
    assert _before(_ClipsACopy()) == []
    assert _before(_Clips()) == [
        "clip_grad_norm_() in losses() of _Clips has no effect, because there is no gradient yet: "
        "remove it, and use --clip-norm"
    ]


class _Habits(Chance):
    """Methods of other libraries, helpers of a notebook, and helpers that are called."""

    warmup_steps: ClassVar[int] = 100
    bs: ClassVar[int] = 3
    layers: ClassVar[int] = 3
    decay: ClassVar[float] = 0.9

    def get_optimizer(self) -> None: ...

    def on_train_epoch_end(self) -> None: ...

    def plot_predictions(self, model: nn.Module) -> None: ...

    def scale(self) -> float:
        return 1.0

    @staticmethod
    def twice(value: float) -> float:
        return value * 2

    def prepare(self, batch: Any, training: bool) -> Any:
        return [part * self.scale() * _Habits.twice(_Habits.decay / 1.8) for part in batch]


def test_names_that_nothing_reads() -> None:
    assert _before(_Habits()) == [
        "no training example has the label of dog (1 of 2 classes): check the labels, such as a "
        "split of sorted examples",
        "nothing reads bs of _Habits: write batch_size",
        "nothing calls get_optimizer() of _Habits: write build_optimizer()",
        "nothing calls on_train_epoch_end() of _Habits: Trainbox calls no hooks",
        "nothing reads warmup_steps of _Habits: write warmup_epochs",
    ]


def test_a_schedule_that_returns_learning_rates(here: Here) -> None:
    """Instead of factors on --lr."""
    here.plant(schedule=lambda task, step, *others: 0.01 * 0.5**step)
    out = here.train(rehearses=True, learning_rate=0.01)
    assert (
        "note       schedule() returns at most 0.01, so the learning rate is at most 0.0001: "
        "return a factor on --lr 0.01, which is 1 for all of it\n"
    ) in out
    for name, rate in (("all", 1.0), ("warm_up", 0.02)):  # --lr 1 may make factors of rates
        assert "schedule() returns" not in here.train(name, rehearses=True, learning_rate=rate)


def test_a_good_training_prints_no_advice(here: Here) -> None:
    assert "note " not in here.train(batch_size=10)


def test_a_training_that_takes_long_has_its_curves_as_a_picture(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train("short")
    assert not (here.path("short") / "curves.png").exists()
    monkeypatch.setattr(report, "_DRAWN_AFTER_S", 0.0)
    assert "\ncurves     runs/long/curves.png\n" in here.train("long")
    assert (here.path("long") / "curves.png").read_bytes().startswith(b"\x89PNG")
    (here.path("full") / "curves.png").mkdir(parents=True)
    assert "runs/full/curves.png is missing: cannot write" in here.train("full")


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        ("input", "example 13 of validation_dataset() has NaN"),
        ("loss", "the statistics of its examples 8 to 15 are NaN: check losses()"),
        ("metric", "check the validation data and metrics()"),
    ],
)
def test_a_validation_with_nan_names_the_example(here: Here, broken: str, text: str) -> None:
    inputs_N4, targets_N = torch.rand(20, 4), torch.rand(20)
    if broken == "input":
        inputs_N4[13, 2] = torch.nan
    of_model = Tiny.losses

    def losses(task: Any, model: Any, batch: Any) -> dict[str, Tensor]:
        found = of_model(task, model, batch)
        if broken == "loss" and not model.training and bool((batch[1] == targets_N[9]).any()):
            found["squared_error"] = found["squared_error"] * torch.nan
        return found

    here.plant(validation_dataset=lambda *_: TensorDataset(inputs_N4, targets_N), losses=losses)
    if broken == "metric":
        here.plant(metrics=lambda *_: {"loss": float("nan")})
    code, out, _ = here.command("train", TINY, "--device", "cpu", "--epochs", "1", "--run", "r")
    assert code == 6
    lines = [line for line in out.splitlines() if "of the validation is NaN" in line]
    assert lines == [
        "step 6: loss of the validation is NaN, so this checkpoint cannot be the best: " + text
    ]
