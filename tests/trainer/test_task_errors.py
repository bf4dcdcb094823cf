"""A mistake in a task: exit code 2 and one line with the cure, before the first step where it can
be found there.
"""

import copy
import dataclasses
import errno
import functools
import os
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, ClassVar

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

from tests.support.here import Here, board_of
from tests.support.tiny import StepCounter, Tiny
from trainbox import pictures
from trainbox.classification import Classification
from trainbox.schedules import scheduler_factor
from trainbox.task import Task

# Shape suffixes: B examples of a batch, N examples.


@dataclasses.dataclass(frozen=True)
class Three(Classification):
    """Three classes of four numbers; each mistake below changes one thing."""

    epochs: ClassVar[int] = 1
    batch_size: ClassVar[int] = 8
    class_names: ClassVar[tuple[str, ...]] = ("cat", "dog", "emu")

    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        return _rows(26)

    def validation_dataset(self, data_dir: Path) -> Dataset[Any]:
        return _rows(20)

    def build_model(self) -> nn.Module:
        return nn.Linear(4, 3)


def _rows(count: int) -> TensorDataset:
    labels_N = torch.arange(count) % 3
    return TensorDataset(nn.functional.one_hot(labels_N, 4).float(), labels_N)


def _loaded(weights: Mapping[str, Any]) -> nn.Module:
    model = nn.Linear(4, 3)
    model.load_state_dict(weights)
    return model


def _of_whole_batch(_task: Task, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return {"error": model(batch)}


def _of_val_loss(_task: Task, _step: int, _total: int, _w: int, _epoch: float, found: Any) -> float:
    return float(sum(metrics["val_loss"] for metrics in found)) or 1.0


def _of_last_loss(*args: Any) -> float:
    return 0.5 if args[-1][-1]["loss"] < 1 else 1.0


def _of_best_loss(*args: Any) -> float:
    return 0.5 if min(metrics["loss"] for metrics in args[-1]) < 1 else 1.0


def _of_warmup(_task: Task, step: int, _total: int, warmup: int, *_others: Any) -> float:
    return min(1.0, step / warmup)


def _of_step(_task: Task, step: int, *_others: Any) -> float:
    return float(step**-0.5)


def _of_two_steps(_task: Task, step: int, _total: int, _w: int, _epoch: float, _v: Any) -> float:
    return (1.0, 0.5)[step + 2]


_of_whole_batch.__code__ = _of_whole_batch.__code__.replace(co_name="losses")
for _function in (_of_val_loss, _of_last_loss, _of_best_loss, _of_warmup, _of_step, _of_two_steps):
    _function.__code__ = _function.__code__.replace(co_name="schedule")


def _pictures(*_: Any) -> TensorDataset:
    return TensorDataset(torch.zeros(26, 1, 4, 4), torch.arange(26) % 3)


class _TimeFirst(nn.Module):
    """A model whose output has one row fewer than the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, inputs_B4: Tensor) -> Tensor:
        logits_B3: Tensor = self.layer(inputs_B4)
        return logits_B3[1:]


def _of_a_built_scheduler(_task: Task, step: int, *_others: Any) -> float:
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    built: Any = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    return scheduler_factor(built, step)


class Listed(Dataset[Any]):
    """The examples that it is given, through a loader."""

    def __init__(self, examples: list[Any]) -> None:
        self.examples = examples

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Any:
        return self.examples[index]


class Unindexed(Dataset[Any]):
    def __len__(self) -> int:
        return 26

    def __getitem__(self) -> Any:  # type: ignore[override]  # noqa: PLE0302
        return _ZEROS


class Exhausted(Listed):
    """Its examples come from an iterator that has ended."""

    def __init__(self) -> None:
        super().__init__([None] * 26)

    def __getitem__(self, index: int) -> Any:
        return next(iter(()))


class Endless(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(_rows(26))

    def __len__(self) -> int:
        return 26


class Expanded(StepCounter):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.zeros(1).expand(3))


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(_ctx: Any, value_B: Tensor) -> Tensor:
        return value_B.clone()

    @staticmethod
    def backward(_ctx: Any, _gradient_B: Tensor) -> Tensor:  # type: ignore[override]
        raise ValueError("no way back")


class _Returning(nn.Linear):
    """Returns what a function makes of its logits."""

    def __init__(self, returns: Callable[[Tensor], Any]) -> None:
        super().__init__(4, 3)
        self.returns = returns

    def forward(self, inputs_B4: Tensor) -> Any:
        return self.returns(super().forward(inputs_B4))


class _FixedState(nn.Module):
    """A recurrent layer whose first state is for 8 examples; an LSTM has two states."""

    def __init__(self, layer: nn.RNNBase, states: int) -> None:
        super().__init__()
        self.layer, self.states = layer, states

    def forward(self, inputs_B4: Tensor) -> Tensor:
        states_183 = (torch.zeros(1, 8, 3),) * self.states
        output_BL3: Tensor
        output_BL3, _ = self.layer(
            inputs_B4[:, None], states_183 if self.states > 1 else states_183[0]
        )
        return output_BL3[:, 0]


class _Unfinished(nn.Module):
    def __init__(self) -> None:
        self.layer = nn.Linear(4, 3)


def _saved_and_loaded() -> Any:
    torch.save(nn.Linear(4, 3), "whole.pt")
    return torch.load("whole.pt")


class _Listing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 3)]

    def forward(self, inputs_B4: Tensor) -> Any:
        return self.layers[0](inputs_B4)


class _Trainer(nn.Linear):
    """Has methods of a script under names of nn.Module."""

    def train(self, loader: Any, epochs: int = 3) -> None:  # type: ignore[override]
        raise AssertionError


class _Evaluating(nn.Linear):
    def eval(self, loader: Any) -> float:  # type: ignore[override]
        raise AssertionError


class _Nested(nn.Linear):
    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return {"layer": super().state_dict()}


@dataclasses.dataclass
class _Compared(nn.Module):
    size: int = 4

    def __post_init__(self) -> None:
        super().__init__()


def _with(name: str, value: Any) -> Callable[..., nn.Module]:
    """Return a build_model() whose model has an attribute `name`."""

    def build(_task: Task) -> nn.Module:
        model = nn.Linear(4, 3)
        vars(model)[name] = value
        return model

    return build


def _exported(_task: Task) -> nn.Module:
    return torch.export.export(nn.Linear(4, 3), (torch.zeros(8, 4),)).module()


def _given(value: Any) -> Callable[..., Any]:
    return lambda *_args, **_names: value


def _labelled(labels_N: Tensor) -> Callable[..., Any]:
    return _given(TensorDataset(torch.zeros(len(labels_N), 4), labels_N))


def _words(word: int) -> Callable[..., Any]:
    return _given(TensorDataset(torch.full((26, 1), word), _rows(26).tensors[1]))


def _rows_as(dtype: torch.dtype) -> Callable[..., Any]:
    inputs_N4, labels_N = _rows(26).tensors
    return _given(TensorDataset(inputs_N4.to(dtype), labels_N))


def _listed(*kinds: Any, count: int = 26) -> Callable[..., Any]:
    return _given(Listed([kinds[i % len(kinds)] for i in range(count)]))


def _raises(error: Exception) -> Callable[..., Any]:
    def method(*_args: Any) -> Any:
        raise error

    return method


def _through_backward(task: Task, model: Any, batch: Any) -> dict[str, Tensor]:
    return {"loss": InBackward.apply(model(batch[0])[:, 0])}


def _after_backward(losses_B: Tensor) -> dict[str, Tensor]:
    losses_B.mean().backward()
    return {"squared_error": losses_B}


def _stepped(task: Task, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    loss_B = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    loss_B.mean().backward(retain_graph=True)
    _sgd(model).step()
    return {"ce": loss_B}


def _descended(task: Task, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    loss_B = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")
    gradients = torch.autograd.grad(loss_B.mean(), list(model.parameters()), retain_graph=True)
    with torch.no_grad():
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            parameter.sub_(gradient)
    return {"ce": loss_B}


def _two_layers(_task: Task) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 3))


def losses(task: Task, _model: Any, _batch: Any) -> None:
    task.calls = 1  # type: ignore[attr-defined]


def statistics(_task: Task, model: nn.Module, batch: Any) -> dict[str, Tensor]:
    return _with_derivative(model, batch[0])


def with_data(task: Three, _data_dir: Path) -> Task:
    return dataclasses.replace(task, class_names=("a",))


_ZEROS = torch.zeros(4)


def _with_derivative(model: nn.Module, inputs_B4: Tensor) -> dict[str, Tensor]:
    inputs_B4 = inputs_B4.clone().requires_grad_()
    outputs_B = model(inputs_B4)
    slope_B4 = torch.autograd.grad(outputs_B.sum(), inputs_B4, create_graph=True)[0]
    return {"loss": slope_B4.square().sum(1) + outputs_B.square()}


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


_LISTED = {
    name: lambda *_args: Listed([(torch.zeros(4), 1.0)] * 26)
    for name in ("train_dataset", "validation_dataset")
}
# Task, what of it is changed, and the message.
# fmt: off
_MISTAKES: dict[str, tuple[type[Task], dict[str, Any], str]] = {
    "no class names": (Three, {"class_names": ()},
     "task Three: class_names is (), not a tuple with the name of each class: "),
    "a number of classes": (Three, {"class_names": 3},
     "task Three: class_names is 3, not a tuple with the name of each class: "),
    "class names without an order": (Three, {"class_names": {"cat": 0, "dog": 1, "emu": 2}},
     "task Three: class_names is {'cat': 0, 'dog': 1, 'emu': 2}, not a tuple with the name of "),
    "fewer class names than outputs": (Three, {"build_model": lambda _task: nn.Linear(4, 5)},
     "task Three: the model returns shape (8, 5) instead of (B, 3), one output for each of "
     "class_names: "),
    "fewer outputs than class names": (Three, {"build_model": lambda _task: nn.Linear(4, 2)},
     "task Three: the model returns shape (8, 2) instead of (B, 3), one output for each of "
     "class_names: "),
    "one output and no second dimension": (Three, {"build_model": lambda _task: nn.Sequential(
        nn.Linear(4, 1), nn.Flatten(0))},
     "task Three: the model returns shape (8,) instead of (B, 3), one output for each of "),
    "a model that is moved": (Three, {"build_model": lambda _task: nn.Linear(4, 3).cuda()},
     "remove .cuda() and .to('cuda'): Trainbox moves the model and the batches to the device"),
    "arrays of NumPy": (Three, {"train_dataset": lambda *_: TensorDataset(
        *(tensor.numpy() for tensor in _rows(26).tensors))},
     "a TensorDataset has tensors: convert arrays of NumPy with torch.from_numpy(...)"),
    "a probability above 1": (Three, {"build_model": lambda _task: nn.Dropout(1.5)},
     "to be between 0 and 1, but got 1.5 ("),
    "a negative size": (Three, {"build_model": lambda _task: nn.Linear(4, -1)},
     "): a size is below 0: correct the task, or the value of --set"),
    "the time first": (Three, {"build_model": lambda _task: _TimeFirst()},
     "match target batch_size (8): the first dimension of the output must be the batch"),
    "two inputs": (Three, {"train_dataset": lambda *_: Listed([(([0.0], [1.0]), 0)] * 26),
     "build_model": lambda _task: nn.Bilinear(1, 1, 3)},
     ": a Classification calls model(inputs): unpack the inputs in forward(self, inputs); "),
    "no build_model": (Tiny, {"build_model": Task.build_model},
     "task Tiny has no method build_model(): define it, and return the nn.Module to train"),
    **{
        f"no return in {method}": (
            Tiny,
            {method: _given(None)},
            f"task Tiny: {method}() returned None: return {wanted}",
        )
        for method, wanted in {
            "with_data": "the task, as in dataclasses.replace(self, ...) (is a `return` missing?)",
            "train_dataset": "a map-style dataset with __len__ and __getitem__, such as "
            "TensorDataset(inputs, labels) (is a `return` missing?)",
            "validation_dataset": "a map-style dataset with __len__ and __getitem__, such as "
            "TensorDataset(inputs, labels) (is a `return` missing?)",
            "notes": "a dict {name: line}, which may be empty (is a `return` missing?)",
            "build_model": "an nn.Module (is a `return` missing?)",
            "statistics": "a dict {name: tensor} (is a `return` missing?)",
            "metrics": "a dict {name: number} (is a `return` missing?)",
            "finished": "True or False (is a `return` missing?)",
            "figures": "a dict {name: picture}, which may be empty (is a `return` missing?)",
            "build_optimizer": "a torch.optim.Optimizer or a tuple of them "
            "(is a `return` missing?)",
            "schedule": "a finite number from 0, the factor on the learning rate "
            "(is a `return` missing?)",
        }.items()
    },
    "no return in prepare": (Tiny, {"prepare": _given(None)},
     "the batch has another form: use the form of the collated examples after prepare()"),
    "a class instead of a model": (Tiny, {"build_model": _given(nn.Linear)},
     "task Tiny: build_model() returned the class Linear: return an nn.Module"),
    "an iterable dataset": (Tiny, {"train_dataset": lambda *_args: Endless()},
     "task Tiny: train_dataset() returned Endless: return a map-style dataset"),
    "a dict of columns": (Three, {"train_dataset": _given(
        {"x": torch.zeros(26, 4), "y": torch.arange(26) % 3})},
     "task Three: train_dataset() returned a dict of x, y, which has no examples 0, 1, ...: return "
     "TensorDataset(x, y)"),
    "a dict of splits": (Three, {"train_dataset": _given({"train": [1, 2], "test": [3]})},
     "task Three: train_dataset() returned a dict of train, test, which has no examples 0, 1, ...: "
     "return a dataset of examples"),
    "a dict of many examples": (Three, {"train_dataset": _given(dict.fromkeys(range(1, 99), 0))},
     "task Three: train_dataset() returned a dict of 1, 2, 3, ..., which has no examples 0, 1, "
     "...: return a dataset of examples"),
    "a dict of columns to validate": (Tiny, {"validation_dataset": _given({"inputs": torch.zeros(
        20, 4), "targets": torch.zeros(20)})},
     "task Tiny: validation_dataset() returned a dict of inputs, targets, which has no examples 0, "
     "1, ...: return TensorDataset(inputs, targets)"),
    "a label out of range in memory": (Three,
     {"train_dataset": _labelled(torch.tensor([0, 7] * 40))}, "task Three: the labels are from 0 "
     "to 7, but class_names has 3 names: number the classes from 0 to 2"),
    "a label out of range in a file": (Three, {"train_dataset": _listed((_ZEROS, 1), (_ZEROS, 3))},
     "task Three: the labels are from 1 to 3, but class_names has 3 names"),
    "a label that torch ignores": (Three,
     {"train_dataset": _labelled(torch.tensor([0, -100] * 40))}, "task Three: the labels are from "
     "-100 to 0, but class_names has 3 names: number the classes from 0 to 2"),
    "a label that torch ignores in a file": (Three,
     {"train_dataset": _listed((_ZEROS, -100), (_ZEROS, 2))},
     "task Three: the labels are from -100 to 2, but class_names has 3 names"),
    "a label that torch ignores in the validation": (Three,
     {"validation_dataset": _labelled(torch.tensor([1, -100] * 40))},
     "task Three: the labels are from -100 to 1, but class_names has 3 names"),
    "two classes of one name": (Three, {"class_names": ("a", "b", "a")},
     "task Three: class_names has 'a' twice: give each class a name of its own"),
    "labels that are text": (Three, {"train_dataset": _listed((_ZEROS, "cat"))},
     "task Three: the labels are text ('cat') instead of numbers: use the index of each class in "
     "class_names"),
    "labels that are floats": (Three, {"train_dataset": _labelled(torch.ones(26))},
     "task Three: the labels are float32 of shape (8,) instead of int64 of shape (B,): convert "
     "them with .long()"),
    "labels before the inputs": (Three,
     {"train_dataset": lambda *_: TensorDataset(*_rows(26).tensors[::-1])},
     "task Three: the labels are float32 of shape (8, 4) instead of int64 of shape (B,): return "
     "(inputs, labels) from the dataset, because the pair may be swapped"),
    "labels before inputs that are words": (Three, {"train_dataset": lambda *_: TensorDataset(
        _rows(26).tensors[1], torch.ones(26, 4, dtype=torch.int64))},
     "the labels are int64 of shape (8, 4) from 1 to 1 instead of int64 of shape (B,): return "
     "(inputs, labels) from the dataset, because the pair may be swapped"),
    **{
        f"labels {dtype} of shape (B, {size})": (
            Three,
            {"train_dataset": _labelled(torch.zeros(26, *size, dtype=dtype))},
            f"instead of int64 of shape (B,): {remedy}",
        )
        for dtype, size, remedy in (
            (torch.int64, (5, 5), "derive from Task, and return a loss for each example"),
            (torch.int64, (2,), "derive from Task, and return a loss for each example"),
            (torch.int64, (3,), "convert one-hot labels with .argmax(1)"),
            (torch.float32, (3,), "convert one-hot labels with .argmax(1)"),
            (torch.int64, (1,), "convert them with .squeeze(1)\n"),
            (torch.uint8, (1,), "convert them with .squeeze(1).long()\n"),
        )
    },
    "a cross-entropy of labels of shape (B, 1)": (Three, {
        "losses": lambda _task, model, batch: {
            "ce": nn.functional.cross_entropy(model(batch[0]), batch[1][:, None])}},
     "the labels have more dimensions than the loss of an output (B, K) takes: remove a "),
    "inputs that are whole numbers": (Three, {"train_dataset": _rows_as(torch.int64)},
     "but got Long and Float (the model got int64 of shape (8, 4) from 0 to 1): the inputs are "
     "whole numbers: convert them with .float(), or return (inputs, labels) from the dataset if "),
    "a batch that is a dict": (Three, {"train_dataset": _listed({"image": _ZEROS, "label": 1})},
     "task Three: a batch is a dict of image, label instead of (inputs, labels): return pairs "
     "from the dataset"),
    "None in an example": (Three, {"train_dataset": _listed((_ZEROS, None))},
     "task Three: the batch of its examples raised TypeError: default_collate: batch must "
     "contain tensors, numpy arrays, numbers, dicts or lists; found <class 'NoneType'>: an "
     "example is or contains None: return tensors or numbers"),
    "float64 inputs": (Three, {"train_dataset": _rows_as(torch.float64)},
     "() raised RuntimeError: mat1 and mat2 must have the same dtype, but got Double and Float ("),
    "a pair as the input": (Tiny, {"losses": _of_whole_batch},
     "; batch is a tuple of 2): unpack the batch, as in inputs, targets = batch; traceback"),
    "a tuple of one as the input": (Tiny, {
        "train_dataset": lambda *_: TensorDataset(torch.zeros(26, 4)),
        "losses": _of_whole_batch},
     "; batch is a tuple of 1): unpack the batch, as in inputs, = batch; traceback"),
    "a dict as the input": (Tiny, {
        "train_dataset": lambda *_: Listed([{"x": torch.zeros(4), "y": 0}] * 26),
        "losses": _of_whole_batch},
     "; batch is a dict of x, y): give the model the tensor of a key, as in model(batch['x'])"),
    "numpy in a loss": (Tiny, {
        "losses": lambda _task, model, batch: {"l": numpy.square(model(batch[0]).numpy())}},
     "a loss needs the functions of torch, as torch.square instead of numpy.square: remove "),
    "numpy of a tensor in a loss": (Tiny, {
        "losses": lambda _task, model, batch: {"l": numpy.square(model(batch[0]))}},
     "a loss needs the functions of torch, as torch.square instead of numpy.square: remove "),
    "an accuracy as the loss": (Three, {"losses": lambda _task, model, batch: {
        "err": (model(batch[0]).argmax(1) != batch[1]).float()}},
     "no loss depends on a trained parameter: argmax() and comparisons have no gradient, so "),
    "a train() of a script in the model": (Three, {"build_model": lambda _task: _Trainer(4, 3)},
     "task Three: model.train() fails with TypeError: _Trainer.train() missing 1 required "
     "positional argument: 'loader': rename _Trainer.train, which takes the place of "
     "nn.Module.train\n"),
    "an eval() of a script in the model": (Three, {"build_model": lambda _: _Evaluating(4, 3)},
     "task Three: model.eval() fails with TypeError: missing a required argument: 'loader': rename "
     "_Evaluating.eval, which takes the place of nn.Module.eval\n"),
    "a state_dict() that is nested": (Three, {"build_model": lambda _task: _Nested(4, 3)},
     "task Three: model.load_state_dict() fails with RuntimeError: Error(s) in loading state_dict "
     "for _Nested: rename _Nested.state_dict, which takes the place of nn.Module.state_dict\n"),
    **{
        f"a model with {name} = {value!r}": (Three, {"build_model": _with(name, value)},
         f"task Three: model.{name}() fails with TypeError: {text}: rename Linear.{name}, which "
         f"takes the place of nn.Module.{name}\n")
        for name, value, text in (
            ("train", True, "'bool' object is not callable"),
            ("modules", ["a"], "'list' object is not callable"),
            ("modules", lambda: ["a"], "it has a str instead of a Module"),
            ("parameters", {"n": 3}, "'dict' object is not callable"),
        )
    },
    "an exported model": (Three, {"build_model": _exported},
     "task Three: model.train() fails with NotImplementedError: Calling train() is not supported "
     "yet: return the model itself from build_model(), without torch.export\n"),
    "a model that is a dataclass": (Three, {"build_model": lambda _task: _Compared()},
     ": unhashable type: '_Compared': write @dataclass(eq=False) above the class of the model\n"),
    "a method that is a property": (Three, {"build_model": property(lambda _: nn.Linear(4, 3))},
     "task Three: build_model is a property, but Trainbox calls build_model(): remove the "
     "decorator above def build_model\n"),
    "a change in place": (Three, {"build_model": lambda _task: _Returning(
        lambda logits_B3: [h := logits_B3.sigmoid(), h.square(), h.add_(1)][1])},
     "write h = h + 1 instead of h += 1, and leave out inplace=True and the functions that end"),
    "a derivative in losses": (Tiny, {
        "losses": lambda _task, model, batch: _with_derivative(model, batch[0])},
     "): gradients are off in a validation: write `with torch.enable_grad():` around what needs "),
    "a derivative in statistics": (Tiny, {
        "statistics": statistics},
     "): gradients are off in a validation: write `with torch.enable_grad():` around what needs "),
    **{
        f"a norm for {kind.__name__}": (Three, {"train_dataset": _given(TensorDataset(
            torch.zeros(26, *size), torch.zeros(26, dtype=torch.int64))),
         "build_model": lambda _task, kind=kind, size=size: kind(size[0])},
         f": this norm is for inputs of other dimensions: use its form {form}, or add a channel "
         "to pictures (B, H, W) with x.unsqueeze(1); traceback")
        for kind, size, form in (
            (nn.BatchNorm2d, (4,), "1d"),
            (nn.BatchNorm1d, (4, 5, 5), "2d"),
            (nn.BatchNorm2d, (4, 5, 5, 5), "3d"),
        )
    },
    "half precision": (Three, {"build_model": lambda _task: nn.Linear(4, 3).half()},
     ": half precision meets float32: remove .half() and .bfloat16(), and use --precision bf16"),
    "bfloat16": (Three, {"build_model": lambda _task: nn.Linear(4, 3).bfloat16()},
     ": half precision meets float32: remove .half() and .bfloat16(), and use --precision bf16"),
    "the parameters of the task": (Tiny, {"build_optimizer": lambda task, *_args:
        torch.optim.SGD(task.parameters())},
     ": write model.parameters(): the task is not the model"),
    "a metric that a schedule lacks": (Tiny, {
        "schedule": _of_val_loss},
     "; validations has loss): a key of validations is one of these names, which metrics() "),
    "a model with two inputs": (Three, {"build_model": lambda _task: nn.Bilinear(4, 4, 3)},
     ": a Classification calls model(inputs): return ((x, mask), labels) from the dataset, and "),
    "weights of another model": (Three, {"build_model": lambda _task: _loaded({"fc.weight": 1})},
     'loading state_dict for Linear: Missing key(s) in state_dict: "weight", "bias". Unexpected '
     'key(s) in state_dict: "fc.weight" ('),
    "many weights of another model": (Three, {"build_model": lambda _task: _loaded(
        {f"layer.{number}.weight": 1 for number in range(500)})},
     'Missing key(s) in state_dict: "weight", "bias". Unexpected key(s) in state_dict: "layer.0.w'),
    "weights of another size": (Three, {"build_model": lambda _task: _loaded(
        nn.Linear(4, 5).state_dict())},
     "): remove load_state_dict() and give the file with --init, which loads the tensors whose "),
    "no Flatten": (Three, {"train_dataset": _pictures, "build_model": lambda _task:
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(8, 3))},
     "(the model got float32 of shape (8, 1, 4, 4)): put nn.Flatten() before the layer, and write "
     "nn.Linear(8, 3) for all numbers of an example"),
    "no Flatten, and another size": (Three, {"train_dataset": _pictures, "build_model": lambda _:
        nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(99, 3))},
     "put nn.Flatten() before the layer, and write nn.Linear(8, 3) for all numbers of an example"),
    "no Flatten, and a layer for a row": (Three, {"train_dataset": _pictures,
     "build_model": lambda _: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 3))},
     "the model returns shape (8, 2, 2, 3) instead of (B, 3): put nn.Flatten() before its last "
     "layer, which then gets all numbers of an example, or return the mean over the dimensions"),
    "a model for other sequences": (Three, {"train_dataset": lambda *_: TensorDataset(
        torch.zeros(26, 5, 4), torch.zeros(26, dtype=torch.int64)),
     "build_model": lambda _: nn.Linear(7, 3)},
     "(the model got float32 of shape (8, 5, 4)): the layer gets 4 numbers for each example"),
    "a model for other inputs": (Three, {"build_model": lambda _task: nn.Linear(5, 3)},
     "shapes cannot be multiplied (8x4 and 5x3) (the model got float32 of shape (8, 4)): the layer "
     "gets 4 numbers for each example: write nn.Linear(4, 3)"),
    **{
        f"a model that returns {form}": (
            Three,
            {"build_model": lambda _task, returns=returns: _Returning(returns)},
            f"task Three: the model returns {form} instead of the logits (B, K): return the ",
        )
        for form, returns in {
            "a dict of logits": lambda logits: {"logits": logits},
            "a tuple of 2": lambda logits: (logits, logits),
            "nothing": lambda _logits: None,
        }.items()
    },
    "a loss of a dict": (Tiny, {"losses": lambda _task, model, batch: {
        "loss": nn.functional.mse_loss({"output": model(batch[0])}, batch[1])}},
     "if this is the output of the model, take the tensor out of it; traceback in"),
    "a loss of nothing": (Tiny, {"losses": lambda _task, model, batch: {
        "loss": print(model(batch[0])) - batch[1]}},
     "a value is missing: a forward() or another function may have no return; traceback in"),
    "batch norm of one example": (Three, {"batch_size": 1, "build_model": lambda _task:
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3))},
     "batch norm needs two examples in each micro-batch: use a larger --batch-size, a lower "),
    "pictures without channels": (Three, {
        "train_dataset": _listed((torch.zeros(9, 9), 1)),
        "build_model": lambda _task: nn.Conv2d(1, 2, 3)},
     "add the channels with inputs.unsqueeze(1) if the inputs have none, or give the first layer"),
    **{
        f"{size} with the channels last": (
            Three,
            {"train_dataset": _listed((torch.zeros(size), 1)), "build_model": _given(layer)},
            f"): the channels are the last dimension: write inputs.permute({order}); traceback",
        )
        for size, layer, order in (
            ((32, 32, 3), nn.Conv2d(3, 2, 3), "0, 3, 1, 2"),
            ((32, 3), nn.Conv1d(3, 2, 3), "0, 2, 1"),
            ((9, 32, 32, 3), nn.Conv3d(3, 2, 3), "0, 4, 1, 2, 3"),
        )
    },
    "an index out of the table": (Three, {
        "train_dataset": _words(5),
        "validation_dataset": _words(5),
        "build_model": lambda _task: nn.Sequential(nn.Embedding(5, 3), nn.Flatten())},
     "index out of range in self (the model got int64 of shape (8, 1) from 5 to 5): "
     "nn.Embedding(N, ...) has the indices 0 to N - 1: number from 0, or raise N"),
    "words that are floats": (Three, {
        "build_model": lambda _task: nn.Sequential(nn.Embedding(5, 3), nn.Flatten())},
     "indices are whole numbers: convert them with .long()"),
    "examples with a gradient": (Three, {"train_dataset": lambda *_: TensorDataset(
        torch.zeros(26, 4, requires_grad=True) * 2, _rows(26).tensors[1])},
     "a tensor of the data or of an earlier step has a gradient: use .detach() where it is kept"),
    "an example that is None": (Three, {"train_dataset": _listed((_ZEROS, 1), None)},
     "an example is or contains None: return tensors or numbers from __getitem__"),
    "text in a batch": (Three, {"train_dataset": _listed(("a good film", 1))},
     "(the model got text ('a good film')): turn text into numbers in __getitem__() of the "),
    "text in a batch of a task with its own losses": (Tiny, {
        "train_dataset": _listed(("a good film", 1.0)),
        "losses": lambda _task, model, batch: {"mse": model(batch[0]) - batch[1]}},
     ": if this is text, turn it into numbers in __getitem__() or collate(); if this is the "),
    "text in a tensor": (Three, {"train_dataset": lambda *_: TensorDataset(torch.tensor(["a"]))},
     ": a tensor has no text: turn each text into a number, as in names.index(text); traceback"),
    "a text added to a path": (Three, {"train_dataset": lambda _, place: place + "/x.csv"},
     ": data_dir is a Path: write data_dir / 'NAME'; traceback"),
    "a path added to a text": (Three, {"train_dataset": lambda _, place: "x/" + place},
     ": data_dir is a Path: write data_dir / 'NAME'; traceback"),
    "a module without its constructor": (Three, {"build_model": lambda _task: _Unfinished()},
     ": begin __init__() of the model with super().__init__(); traceback"),
    "a missing module": (Three, {"build_model": lambda _task: __import__("pakage")},
     ": install the package that has pakage in the environment of Trainbox, or put pakage.py "
     "beside the task; traceback"),
    "a model that is saved as a whole": (Three, {"build_model": lambda _task: _saved_and_loaded()},
     "do those steps only if you trust the source of the checkpoint ("),
    "layers in a plain list": (Three, {"build_model": lambda _task: _Listing()},
     "the model has no parameters: keep layers of a list in an nn.ModuleList"),
    "inputs that are bytes": (Three, {"train_dataset": _rows_as(torch.uint8)},
     "the inputs are bytes: convert them in prepare(), as in inputs.float() / 255"),
    "a lazy layer": (Three, {"build_model": lambda _task: nn.LazyLinear(3)},
     "task Three: build_model() does not set the size of weight: give its layer the input size"),
    "a model without values": (Three, {"build_model": lambda _task: nn.Linear(4, 3, device="meta")},
     "task Three: build_model() leaves weight on the meta device, without values: build the "
     "model on the CPU"),
    "a dataset without an index": (Tiny, {"train_dataset": lambda *_args: Unindexed()},
     "task Tiny: Unindexed.__getitem__() raised TypeError: Unindexed.__getitem__() takes 1 "
     "positional argument but 2 were"),
    "a default of another type": (Tiny, {"epochs": "3"},
     "task Tiny: epochs is '3': set it to a whole number from 1"),
    "a buffer made by expand": (Tiny, {"build_model": lambda _task: Expanded()},
     "task Tiny: build_model() creates grid with expand(), so its values share memory and cannot "
     "be restored: add .clone()"),
    "an optimizer that needs a closure": (Tiny,
     {"build_optimizer": lambda _task, model, *_args: torch.optim.LBFGS(model.parameters())},
     "task Tiny: LBFGS.step() cannot be called without arguments (missing a required argument: "
     "'closure'), as a training step does: use another optimizer, such as AdamW"),
    "a task that counts": (Tiny, {"losses": losses},
     ": a task is frozen: keep a counter in a buffer of the model, and a factor on the learning"),
    "a task that sets an attribute": (Tiny,
     {"train_dataset": lambda task, _place: setattr(task, "noise", 1.0)},
     "() raised FrozenInstanceError: cannot assign to field 'noise' ("),
    "finished returns a text": (Tiny, {"finished": _given("no")},
     "task Tiny: finished() returned str: return True or False"),
    "finished returns a tensor": (Tiny, {"finished": _given(torch.zeros(2))},
     "task Tiny: finished() returned Tensor: return True or False"),
    **{
        f"a metric named {name!r}": (
            Tiny,
            {"metrics": _given({"loss": 1.0, name: 2.0})},
            f"task Tiny: metrics() returned a metric named {name!r}, which is "
            "reserved or not printable: rename it",
        )
        for name in ("step", "a\nb")
    },
    "an example that raises StopIteration": (Tiny,
     {"validation_dataset": lambda *_args: Exhausted()},
     "raised RuntimeError: example 0 raised StopIteration"),
    "no return in losses": (Tiny, {"losses": _given(None)},
     "task Tiny: losses() returned None: return a dict {name: "),
    **{
        f"no self in {method}": (
            Tiny,
            {method: lambda: None},
            f"task Tiny: {method}() has the wrong parameters (invalid method signature): write "
            f"def {method}({parameters})",
        )
        for method, parameters in {
            "build_model": "self",
            "with_data": "self, data_dir",
            "losses": "self, model, batch",
        }.items()
    },
    "no self in a method of its own": (Tiny,
     {"net": lambda: None, "build_model": lambda task: task.net()},
     "takes 0 positional arguments but 1 was given ("),
    "backward in losses": (Tiny, {"losses": lambda _task, model, batch:
        _after_backward(nn.functional.mse_loss(model(batch[0]), batch[1], reduction="none"))},
     ": losses() only returns the losses: remove backward() from it; if it has none, a tensor"),
    "backward of a loss for each example": (Tiny, {"losses": lambda _task, model, batch:
        model(batch[0]).square().backward()},
     ": losses() only returns the losses: remove backward() from it; traceback in"),
    "a binary cross-entropy of logits": (Tiny, {"losses": lambda _task, model, batch:
        {"bce": nn.functional.binary_cross_entropy(model(batch[0]) - 99, torch.ones(8))}},
     ": the outputs are logits: use F.binary_cross_entropy_with_logits, or a sigmoid as the last"),
    "a loss of nn that is built instead of called": (Three,
     {"losses": lambda _task, model, batch: {"ce": nn.CrossEntropyLoss(model(batch[0]), batch[1])}},
     '): nn.CrossEntropyLoss(...) takes options: write nn.CrossEntropyLoss(reduction="none")'
     "(output, targets); "),
    "a loss of nn that is built with an option": (Tiny, {"losses": lambda _task, model, batch:
        {"bce": nn.MSELoss(model(batch[0]), batch[1], reduction="none")}},
     '): nn.MSELoss(...) takes options: write nn.MSELoss(reduction="none")(output, targets); '),
    "a schedule of the last loss": (Tiny, {"schedule": _of_last_loss},
     "; there is no validation yet): validations is empty until the first one: if schedule() "
     "reads it without a check, begin with `if not validations: return 1.0`; "),
    "a schedule of the best loss": (Tiny, {"schedule": _of_best_loss},
     "; there is no validation yet): validations is empty until the first one: if schedule() "
     "reads it without a check, begin with `if not validations: return 1.0`; "),
    "a schedule of too few factors": (Tiny, {"schedule": _of_two_steps}, "): fix the task; "),
    "a schedule that divides by the warm-up": (Tiny, {"schedule": _of_warmup},
     "): a divisor is 0, such as step at the start, or warmup_steps without --warmup-epochs: "
     "write max(1, DIVISOR); "),
    "a schedule of 1 over the root of the step": (Tiny, {"schedule": _of_step},
     "): a divisor is 0, such as step at the start, or warmup_steps without --warmup-epochs: "
     "write max(1, DIVISOR); "),
    "the weight decay of an AdamW": (Tiny, {"build_optimizer": lambda _task, model, _name, rate,
        weight_decay: torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=weight_decay)},
     "): weight_decay is None without --weight-decay: write weight_decay = 0.01 in the class for "
     "a default; "),
    "the weight decay of an SGD": (Tiny, {"build_optimizer": lambda _task, model, _name, rate,
        weight_decay: torch.optim.SGD(model.parameters(), lr=rate, weight_decay=weight_decay)},
     "): weight_decay is None without --weight-decay: write weight_decay = 0.01 in the class for "
     "a default; "),
    "a view of a full batch": (Three,
     {"build_model": lambda _task: _Returning(lambda logits_B3: logits_B3.view(8, 3))},
     "): batches have different numbers of examples: if 8 is written there, write x.shape[0] "
     "instead; "),
    "a shape of a full batch and the rest": (Three, {"build_model": lambda _task: _Returning(
        lambda logits_B3: logits_B3[:, :, None].expand(-1, -1, 3).reshape(8, -1)[:, :3])},
     "): batches have different numbers of examples: if 8 is written there, write x.shape[0] "
     "instead; "),
    "a view of no numbers": (Three,
     {"build_model": lambda _task: _Returning(lambda logits_B3: logits_B3.view(8, 0))},
     "): fix the task; "),
    "a view of too few numbers": (Three,
     {"build_model": lambda _task: _Returning(lambda logits_B3: logits_B3[:, :2].view(-1, 1)
        .view(len(logits_B3), 1))},
     "): fix the task; "),
    "a view of another size": (Three,
     {"build_model": lambda _task: _Returning(lambda logits_B3: logits_B3.view(-1, 5))},
     "): fix the task; "),
    "the state of a GRU for a full batch": (Three,
     {"build_model": lambda _task: _FixedState(nn.GRU(4, 3, batch_first=True), 1)},
     "): batches have different numbers of examples: if 8 is written there, write x.shape[0] "
     "instead; if the first dimension of its input is the batch, add batch_first=True; "),
    "the state of an LSTM for a full batch": (Three,
     {"build_model": lambda _task: _FixedState(nn.LSTM(4, 3, batch_first=True), 2)},
     "): batches have different numbers of examples: if 8 is written there, write x.shape[0] "
     "instead; if the first dimension of its input is the batch, add batch_first=True; "),
    "a step of an optimizer in losses": (Three, {"build_model": _two_layers, "losses": _stepped},
     ": losses() only returns the losses: remove backward() and step() from it; if it has none, "
     "write h = h + 1 instead of h += 1, and "),
    "a step by hand in losses": (Three, {"build_model": _two_layers, "losses": _descended},
     ": losses() only returns the losses: remove backward() and step() from it; if it has none, "
     "write h = h + 1 instead of h += 1, and "),
    "a cross-entropy of the labels": (Three, {"losses": lambda _task, model, batch:
        {"ce": nn.functional.cross_entropy(batch[1], model(batch[0]), reduction="none")}},
     "): cross_entropy takes the output of the model before the labels: swap the two arguments; "),
    "a CrossEntropyLoss of the labels": (Three, {"losses": lambda _task, model, batch:
        {"ce": nn.CrossEntropyLoss(reduction="none")(batch[1].int(), model(batch[0]))}},
     "): cross_entropy takes the output of the model before the labels: swap the two arguments; "),
    "a softmax of whole numbers": (Three, {"losses": lambda _task, model, batch:
        {"ce": model(batch[0]).sum(1) * nn.functional.log_softmax(batch[1], 0)}},
     "): fix the task; "),
    "a layer of nn that is built instead of called": (Three, {"build_model": lambda _task:
        _Returning(lambda logits_B3: nn.functional.softplus(nn.LeakyReLU(logits_B3)))},
     "): nn.LeakyReLU(...) takes options: write nn.LeakyReLU()(x); "),
    "an activation of nn that is built instead of called": (Three, {"build_model": lambda _task:
        _Returning(lambda logits_B3: torch.exp(nn.ReLU(logits_B3)))},
     "): nn.ReLU(...) takes options: write nn.ReLU()(x); "),
    "a layer without its input": (Three, {"build_model": lambda _task:
        _Returning(lambda logits_B3: torch.exp(nn.Identity()))},
     "): fix the task; "),
    "a branch on a batch": (Three, {"losses": lambda _task, model, batch:
        {"ce": model(batch[0]) if model(batch[0]) else 0}},
     "): fix the task; "),
    "a binary cross-entropy of three classes": (Tiny, {"losses": lambda _task, model, batch:
        {"bce": nn.functional.binary_cross_entropy(model(batch[0]).sigmoid(), torch.ones(8) * 2)}},
     ": the targets of a binary cross-entropy are from 0 to 1: use F.cross_entropy for more than"),
    "a method with other parameters": (Tiny, {"prepare": lambda _task, batch: batch},
     "task Tiny: prepare() has the wrong parameters (got an unexpected keyword argument "
     "'training'): write def prepare(self, batch, training)"),
    "a method of a Classification with other parameters": (Three,
     {"with_classes": lambda _task: _task},
     "task Three: with_classes() has the wrong parameters (too many positional arguments): write "
     "def with_classes(self, names)"),
    "with_data that replaces a ClassVar": (Three, {"with_data": with_data},
     ": only fields can be replaced: declare a field (class_names: tuple[str, ...] = ()), not a "
     "ClassVar"),
    "an error of its own": (Tiny, {"notes": _raises(ValueError("no such line"))},
     "task Tiny: method() raised ValueError: no such line ("),
    "an error in a backward": (Three, {"losses": _through_backward},
     "raised ValueError: no way back ("),
    "a statistic that is a number": (Tiny, {"statistics": _given({"loss": 0.5})},
     "task Tiny: statistics() returned 'loss' as float instead of a tensor: sum over the batch "
     "without .item()"),
    "a statistic for each example": (Tiny,
     {"statistics": lambda _task, _model, batch: {"loss": batch[1]}},
     "task Tiny: the names or shapes that statistics() returns differ between batches: return "
     "sums over the examples of the batch"),
    "a metric that is a table": (Tiny, {"metrics": _given({"loss": torch.zeros(2)})},
     "task Tiny: metrics() returned 'loss' as Tensor instead of a number: convert it with "
     "float(...)"),
    "an error in metrics": (Tiny, {"metrics": lambda _task, totals: {"loss": float(totals["los"])}},
     "; totals has loss, examples): use one of these names, or return the name from statistics()"),
    "an error in a function that draws": (Tiny,
     {"figures": _given({"curve": functools.partial(pictures.confusion_matrix, None, ("a",))})},
     "task Tiny: figures() raised AttributeError: "),
    "a function that draws random numbers": (Tiny,
     {"figures": _given({"curve": lambda: torch.rand(3, 8, 8)})}, "task Tiny: a function that "
     "figures() returned draws random numbers, which would change the training: draw them in "
     "figures()"),
    "a figure of another form": (Tiny, {"figures": _given({"curve": torch.zeros(8, 8)})},
     "task Tiny: figures() returned 'curve' as Tensor of shape (8, 8): return a uint8 picture of "
     "shape (3, H, W)"),
    "a factor below 0": (Tiny, {"schedule": lambda _task, step, *_: 1 - step},
     "task Tiny: schedule() returned -1: return a finite number from 0, the factor on the "
     "learning rate"),
    "a factor of -inf": (Tiny, {"schedule": _given(float("-inf"))},
     "task Tiny: schedule() returned -inf: return a finite number from 0, the factor on the "),
    "a factor for each group": (Tiny, {"schedule": _given(torch.ones(2))},
     "task Tiny: schedule() returned Tensor: return a finite number from 0, the factor on the "
     "learning rate"),
    "an optimizer of another model": (Tiny,
     {"build_optimizer": lambda *_args: torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.1)},
     "task Tiny: build_optimizer() returned SGD, which has no parameter of the model: give it "
     "model.parameters()"),
    "two optimizers with one parameter": (Tiny,
     {"build_optimizer": lambda _self, model, *_args: (_sgd(model), _sgd(model))},
     "task Tiny: build_optimizer() gives a parameter to two optimizers: give each optimizer "
     "parameters of its own"),
    "an empty tuple of optimizers": (Tiny, {"build_optimizer": lambda *_args: ()},
     "task Tiny: build_optimizer() returned tuple: return a torch.optim.Optimizer or a tuple of "
     "them"),
    "validation examples of several shapes": (Tiny,
     {"validation_dataset": _given(Listed([(torch.zeros(4 + (i == 19)), 1.0) for i in range(20)]))},
     "task Tiny: the batch of its examples raised RuntimeError: stack expects each tensor to be "
     "equal size, but got [4] at entry 0 and [5] at entry "),
    "a metric that is missing": (Tiny, {"train_metrics": ("accuracy",)},
     "task Tiny: losses() did not return 'accuracy', which is in train_metrics: return a tensor "
     "of shape (B,) with this name"),
    "a metric of a reserved name": (Tiny, {"train_metrics": ("samples_per_second",)},
     "task Tiny: train_metrics has the name 'samples_per_second', which is reserved or not "
     "printable: rename it"),
    "one metric without a tuple": (Tiny, {"train_metrics": "accuracy"},
     'task Tiny: train_metrics is \'accuracy\': set it to a tuple of names, such as ("accuracy",)'),
    "only metrics": (Tiny, {"train_metrics": ("squared_error",)}, "task Tiny: no loss depends on "
     "a trained parameter: compute squared_error from the model's output without detach() or "
     "torch.no_grad()"),
    "a frozen model": (Three, {"build_model": lambda _: nn.Linear(4, 3).requires_grad_(False)},
     "task Three: all 2 parameters of the model have requires_grad=False: leave it True in a layer "
     "of build_model(), such as the last one"),
    "a scheduler that is built": (Three, {"schedule": _of_a_built_scheduler},
     "scheduler_factor got 'StepLR', which is no class of a scheduler: give the class and its "
     "options, as in scheduler_factor(StepLR, step, step_size=3)"),
    "no batch": (Tiny, {**_LISTED, "collate": lambda *_args: None}, "task Tiny: collate() "
     "returned None: return a tuple, list or dict of tensors (is a `return` missing?)"),
    "collated tensors in memory": (Tiny, {"collate": lambda *_args: None},
     "task Tiny: train_dataset() returned a TensorDataset, whose batches do not need collate(): "
     "remove collate(), or return another map-style dataset"),
}
# fmt: on


@pytest.mark.parametrize("mistake", _MISTAKES)
def test_a_mistake_is_one_line_with_the_remedy_before_the_first_step(
    here: Here, monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    task, changes, message = _MISTAKES[mistake]
    for name, value in changes.items():
        monkeypatch.setattr(task, name, value, raising=False)
    words = ("--device", "cpu", "--run", "r", "--workers", "0")
    err = here.refused("train", f"{task.__module__}:{task.__name__}", *words)
    assert message in err
    assert not (here.path() / "metrics.jsonl").exists() or here.entries("train") == []
    if " raised " in err:
        assert err.endswith("; traceback in runs/r/logs/rank-0.log\n")
        assert "Traceback (most recent call last)" in (here.path() / "logs/rank-0.log").read_text()


@pytest.mark.parametrize(
    ("method", "file", "remedy"),
    [
        ("train_dataset", "x.csv", "write data_dir / 'x.csv', and set the folder with --data-dir"),
        ("with_data", "x.csv", "write data_dir / 'x.csv', and set the folder with --data-dir"),
        ("build_model", "x.pt", "write Path(__file__).parent / 'x.pt' for a file beside the task"),
        ("train_dataset", "data/x.csv", "put the data there, or set its folder with --data-dir"),
    ],
)
def test_a_missing_file_names_the_folder_of_its_relative_path(
    here: Here, method: str, file: str, remedy: str
) -> None:
    def reads(*_arguments: Any) -> Any:
        return Path(file).read_text()

    reads.__code__ = reads.__code__.replace(co_name=method)
    here.plant(**{method: reads})
    err = here.refused("train", "tests.support.tiny:Tiny", "--device", "cpu", "--run", "r")
    assert f"; relative to the current folder {here.folder}): {remedy}; traceback" in err


def test_tensors_that_a_method_cannot_stack_are_not_those_of_the_dataset(here: Here) -> None:
    def losses(_task: Task, _model: nn.Module, _batch: Any) -> dict[str, Tensor]:
        return {"mse": torch.stack([torch.ones(3), torch.ones(4)])}

    here.plant(losses=losses)
    err = here.refused("train", f"{Tiny.__module__}:Tiny", "--device", "cpu", "--run", "r")
    assert "task Tiny: losses() raised RuntimeError: stack expects each tensor to be equal" in err


class _AlwaysDrops(nn.Linear):
    def forward(self, inputs_B4: Tensor) -> Tensor:
        return nn.functional.dropout(super().forward(inputs_B4), 0.1)


class _Creates(nn.Linear):
    def forward(self, inputs_B4: Tensor) -> Tensor:
        found: Tensor = super().forward(nn.Linear(4, 4)(inputs_B4))
        return found


class _Generates(nn.Linear):
    """A layer gives the form of a call, and the model computes its weights."""

    def forward(self, inputs_B4: Tensor) -> Tensor:
        form = nn.Linear(4, 3, bias=False)
        weights = {"weight": self.weight * 2}
        found: Tensor = torch.func.functional_call(form, weights, (inputs_B4,))
        return found + self.bias


def _relu_last() -> nn.Module:
    layer = nn.Linear(4, 3)
    nn.init.zeros_(layer.weight)
    layer.bias.data.copy_(torch.tensor([2.0, -2.0, 1.0]))
    return nn.Sequential(layer, nn.ReLU())


@pytest.mark.parametrize(
    ("model", "advice"),
    [
        (nn.Linear(4, 3), ""),
        (nn.Sequential(nn.Linear(4, 3), nn.Dropout()), ""),
        (nn.Sequential(nn.Linear(4, 3), nn.Softplus()), ""),
        (
            nn.Sequential(nn.Linear(4, 3), nn.Softmax(1)),
            "note       the loss cross_entropy applies a softmax to the output of a softmax: "
            "remove the softmax of the model, because cross_entropy and log_softmax take logits",
        ),
        (
            nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Flatten()),
            "note       the loss cross_entropy applies a softmax to the output of a sigmoid: "
            "remove the sigmoid of the model, because cross_entropy and log_softmax take logits",
        ),
        (nn.Sequential(nn.Linear(4, 3), nn.Sigmoid(), nn.Linear(3, 3)), ""),
        (
            _relu_last(),
            "the model's outputs are never below 0: remove its last ReLU, because the "
            "cross-entropy needs numbers of any sign",
        ),
        (
            _AlwaysDrops(4, 3),
            "the model draws random numbers in a validation: draw them only if self.training, as "
            "in F.dropout(x, training=self.training)",
        ),
        (
            _Creates(4, 3),
            "note       a step creates the layer Linear, which is neither trained nor saved: "
            "create it in __init__() of the model",
        ),
        (_Generates(4, 3), ""),
    ],
)
def test_doubtful_outputs_of_a_classification_are_reported_once(
    here: Here, monkeypatch: pytest.MonkeyPatch, model: nn.Module, advice: str
) -> None:
    here.rehearses = True
    monkeypatch.setattr(Three, "build_model", lambda _task: copy.deepcopy(model))
    words = ("train", f"{Three.__module__}:Three", "--device", "cpu", "--max-steps", "2")
    lines = here.succeeds(*words, "--run", "r").splitlines()
    found = [
        line
        for line in lines
        if line.startswith(("the model", "note       the l", "note       a s"))
    ]
    assert found == ([advice] if advice else [])


@pytest.mark.parametrize("is_new", [True, False])
def test_a_layer_that_losses_create_is_noted(here: Here, is_new: bool) -> None:
    """As in a forward of the model; a copy under no_grad() is a teacher."""

    def losses(_task: Task, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        with torch.no_grad():
            nn.Linear(4, 1)(batch[0])
            copy.deepcopy(model)(batch[0])
        outputs_B1 = model(batch[0])[:, None]
        return {"l": (nn.PReLU()(outputs_B1) if is_new else outputs_B1).square().mean(1)}

    here.plant(losses=losses)
    out = here.train(rehearses=True, max_steps=2)
    text = "note       a step creates the layer PReLU, which is neither trained nor saved: create"
    assert (text in out, "creates the layer" in out) == (is_new, is_new)


def test_a_dict_of_examples_is_a_dataset(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    examples = dict.fromkeys(range(26), (_ZEROS, 1))
    monkeypatch.setattr(Three, "train_dataset", _given(examples))
    words = ("train", f"{Three.__module__}:Three", "--device", "cpu", "--max-steps", "2")
    here.succeeds(*words, "--workers", "0", "--run", "r")


class _LoadsAFile(nn.Linear):
    def load_state_dict(self, path: Any, *_others: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(torch.load(path))


class _ReadsAFile(nn.Linear):
    def load_state_dict(self, path: Any, *_others: Any) -> Any:  # type: ignore[override]
        return super().load_state_dict(torch.load(Path(path) / "weights.pt"))


@pytest.mark.parametrize("kind", [_LoadsAFile, _ReadsAFile])
def test_a_model_that_loads_from_a_file_names_its_method(
    here: Here, monkeypatch: pytest.MonkeyPatch, kind: type[nn.Module]
) -> None:
    here.rehearses = True
    monkeypatch.setattr(Three, "build_model", lambda _task: kind(4, 3))
    words = ("train", f"{Three.__module__}:Three", "--device", "cpu", "--max-steps", "2")
    err = here.refused(*words, "--run", "r")
    assert "task Three: load_state_dict() raised " in err
    assert (
        ": the model has a load_state_dict() of its own, which a resume calls with the weights: "
        "rename it; "
    ) in err


def test_a_classification_with_other_statistics_has_no_confusion_matrix(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Three, "statistics", Task.statistics)
    monkeypatch.setattr(Three, "metrics", lambda _task, totals: {"loss": float(totals["loss"])})
    words = ("train", f"{Three.__module__}:Three", "--device", "cpu", "--best-by", "loss")
    here.succeeds(*words, "--run", "r")
    assert "loss" in here.entries("validation")[-1]


def test_a_loss_of_two_shapes_is_refused_instead_of_broadcast(here: Here) -> None:
    def losses(_task: Task, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_B4, targets_B = batch
        output_B1 = model(inputs_B4)[:, None]
        loss_BB = nn.functional.mse_loss(output_B1, targets_B, reduction="none")
        return {"mse": loss_BB.mean(1)}

    here.plant(losses=losses)
    words = ("train", "tests.support.tiny:Tiny", "--device", "cpu", "--run", "r")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as torch's warning is one line among others
        err = here.refused(*words)
    assert ": give the output and the targets the same shape: squeeze an output of shape" in err


# fmt: off
_WORDS = [
    (("--best-by", "foo"), "--best-by foo: the task has no metric foo; it has loss: name one of "
     "them with --best-by, or as best_by in the class of the task"),
    (("--early-stopping", "max:foo"),
     "--early-stopping max:foo: the task has no metric foo; it has loss: name one of them"),
]
# fmt: on


@pytest.mark.parametrize(("words", "message"), _WORDS)
def test_an_unknown_metric_is_refused_before_the_first_step(
    here: Here, words: tuple[str, ...], message: str
) -> None:
    err = here.refused("train", "tests.support.tiny:Tiny", "--device", "cpu", "--run", "r", *words)
    assert err == f"trainbox: {message}\n"
    assert not here.path().exists()  # nothing was recorded


def test_an_error_in_a_later_step_keeps_the_checkpoints(here: Here) -> None:
    plain = Tiny.losses

    def sometimes(task: Tiny, model: Any, batch: Any) -> dict[str, Tensor]:
        losses = plain(task, model, batch)
        if model.training and int(model.forwards) == 4:
            raise ValueError("example 7 is broken")
        return losses

    here.plant(losses=sometimes)
    words = ("--device", "cpu", "--run", "r", "--checkpoint-steps", "1", "--fast")
    err = here.refused("train", "tests.support.tiny:Tiny", *words)
    assert err.startswith(
        "trainbox: task Tiny: sometimes() raised ValueError: example 7 is broken ("
    )
    assert here.steps() == [1, 2, 3]


def test_an_error_that_may_pass_is_one_line_with_code_1(here: Here) -> None:
    here.plant(train_dataset=_raises(OSError(errno.EIO, os.strerror(errno.EIO), "data/x.npy")))
    err = here.refused("train", "tests.support.tiny:Tiny", "--device", "cpu", "--run", "r", code=1)
    assert err.startswith(
        "trainbox: task Tiny: method() raised OSError: [Errno 5] Input/output error: 'data/x.npy' ("
    )


def test_an_assert_of_the_gpu_is_a_mistake_wherever_it_is_raised(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = Future[None]()  # it raises the error outside of the task's code
    later.set_exception(RuntimeError("CUDA error: device-side assert triggered\nCompile with"))
    monkeypatch.setattr("trainer.session.train.closing", later.result)
    err = here.refused("train", "tests.support.tiny:Tiny", "--device", "cpu", "--run", "r")
    assert "task Tiny: a step raised RuntimeError: CUDA error: device-side assert" in err
    assert "a label or an index is out of range" in err


def test_an_error_of_our_own_stays_a_traceback(here: Here, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainer.session.train.closing", int)
    words = ("train", "tests.support.tiny:Tiny", "--device", "cpu", "--max-steps", "1")
    code, _, err = here.command(*words)
    assert code == 1
    assert "Traceback" in err
    assert "TypeError: int() argument must be" in err


class _Broken(Exception):
    def __str__(self) -> str:
        raise KeyError("field")


class _BrokenRuntimeError(_Broken, RuntimeError):
    """An error that could be one of the machine."""


@pytest.mark.parametrize("kind", [_Broken, _BrokenRuntimeError])
@pytest.mark.parametrize("method", ["build_model", "losses", "metrics"])
def test_an_error_without_a_text_is_one_line(
    here: Here, kind: type[Exception], method: str
) -> None:
    def fails(*_: object) -> None:
        raise kind

    here.plant(**{method: fails})
    err = here.refused("train", "tests.support.tiny:Tiny", "--device", "cpu", "--run", "r")
    found = f"raised {kind.__name__}: without a text, because its __str__() raised KeyError"
    assert found in err.splitlines()[-1], err


def test_a_metric_that_needs_more_than_a_sample_is_tried_with_the_whole_set(here: Here) -> None:
    """As an area under a curve needs both classes, and a validation set may be sorted by class."""
    seen = Path("seen")

    def metrics(_task: Task, totals: Mapping[str, Tensor]) -> dict[str, float]:
        with seen.open("a") as file:
            file.write(f"{int(totals['examples'])}\n")
        if totals["examples"] < 20:
            raise ValueError("only one class is present")
        return {"loss": float(totals["loss"]), "area": 0.5}

    here.plant(metrics=metrics)
    out = here.train(max_steps=2, best_by="area", rehearses=True)
    assert "the rehearsal has validated the whole set: a sample is too small (ValueError: " in out
    # 8 + 4 of the sample, the whole, the validation at the end
    assert seen.read_text().split() == ["12", "20", "20"]


def test_the_trial_of_a_validation_leaves_no_trace(here: Here) -> None:
    def figures(_task: Task, model: nn.Module, batch: Any, totals: Any) -> dict[str, Tensor]:
        torch.rand(3)
        model.get_buffer("forwards").add_(1)
        return {"noise": torch.zeros(3, 4, 4, dtype=torch.uint8)}

    here.plant(figures=figures)
    here.train("tried", max_steps=2, rehearses=True)
    shown = board_of(here.path("tried")).Images("validation/noise")
    assert [event.step for event in shown] == [2]
    here.train("untried", max_steps=2)
    assert here.digest("tried") == here.digest("untried")


@pytest.mark.parametrize("batch_size", [1, 2, 3, 8, 19, 20])
def test_a_sample_has_examples_of_a_few_batches_and_their_sizes(batch_size: int) -> None:
    from trainer.data.batches import EvaluationBatches, evaluation_batch_count

    rows = TensorDataset(torch.arange(20))
    every = range(evaluation_batch_count(20, batch_size))
    for dataset in (rows, Subset(rows, range(20))):
        given = EvaluationBatches(dataset, batch_size, every, torch.device("cpu"), 0)
        sample = [(count, batch[0].tolist()) for count, batch in given.sample().iterate()]
        assert all(count == len(batch) for count, batch in sample)
        whole = [batch[0].tolist() for _, batch in given.iterate()]
        assert sample[0][1][0] == 0
        assert sample[-1][1][-1] == 19
        assert all(any(set(batch) <= set(one) for one in whole) for _, batch in sample)
        assert (len(sample[-1][1]) < len(sample[0][1])) == (len(whole[-1]) < len(whole[0]))
        assert all(len(batch) > 1 for _, batch in sample) or 1 in map(len, whole)
        # still whole itself
        assert [len(batch) for _, batch in given.iterate()] == [1] * len(whole)


def test_a_dataclass_that_is_not_frozen(here: Here, tmp_path: Path) -> None:
    head = "from dataclasses import dataclass\nfrom trainbox import Task\n"
    (tmp_path / "melted.py").write_text(
        f"{head}@dataclass\nclass Melted(Task):\n    width: int = 3\n"
    )
    err = here.refused("train", "melted.py:Melted", "--device", "cpu")
    assert "a class in its file is not frozen (melted.py:3): write @dataclass(frozen=True)" in err


class _Unreachable(Three):
    def train_dataset(self, data_dir: Path) -> Dataset[Any]:
        raise ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")


def test_a_server_that_a_task_cannot_reach_is_not_a_lost_process(here: Here) -> None:
    err = here.refused("train", f"{__name__}:_Unreachable", "--device", "cpu", code=1)
    assert "task _Unreachable: train_dataset() raised ConnectionResetError: [Errno 104]" in err
    assert "check that this machine reaches the server that the task connects to" in err
