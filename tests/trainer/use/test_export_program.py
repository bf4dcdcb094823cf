"""The function of the examples that is exported: `prepare`, the model and no label."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.support.kinds import slow_after
from tests.support.tiny import Tiny
from trainbox.errors import WrongUse
from trainbox.task import Task
from trainbox.tensor_trees import take
from trainer.tasks.digits import Digits
from trainer.tasks.har import Har
from trainer.tasks.ssvae import Ssvae
from trainer.tasks.teacher_student import TeacherStudent
from trainer.tasks.text import Text
from trainer.tasks.video import Video
from trainer.use.export_program import export_program, first_call


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


_LABELS = torch.tensor([0, 1, 0, 1, 1])
_ONES = torch.ones(5)


def _first(task: Task, count: int) -> Any:
    """Return the first validation examples of a task."""
    return tuple(tensor[:count] for tensor in task.validation_dataset(Path()).tensors)  # type: ignore[attr-defined]


_BATCHES: dict[str, tuple[Task, Callable[[], Any]]] = {
    "digits": (Digits(width=4), lambda: _first(Digits(), 5)),
    "video": (
        Video(classes="a/b", frames=3, size=16, width=4),
        lambda: (_bytes(5, 3, 16, 16), _LABELS, _ONES),
    ),
    **{
        f"har, {model}": (
            Har(model=model, width=8, layers=1),
            lambda: (torch.randn(5, 9, 128), _LABELS),
        )
        for model in ("cnn", "lstm", "transformer")
    },
    "text": (Text(layers=1, heads=1, width=8, context=5), lambda: (_bytes(5, 6),)),
    "ssvae": (Ssvae(dataset="digits", hidden=8), lambda: _first(Ssvae(dataset="digits"), 5)),
    "teacher_student": (TeacherStudent(), lambda: _first(TeacherStudent(), 5)),
}


@pytest.mark.parametrize("name", slow_after(2, [*_BATCHES]))
def test_the_program_is_the_call_of_the_validation_for_any_number_of_examples(name: str) -> None:
    task, batch_of = _BATCHES[name]
    torch.manual_seed(0)
    model, batch = task.build_model().eval(), batch_of()
    exported = export_program(task, model, batch)
    assert exported.used == {"inputs": 0}
    program = exported.program.module()
    for size in (5, 1, 3):
        part = take(batch, torch.arange(size))
        args, kwargs = first_call(task, model, part)
        expected = model(*args, **kwargs)
        assert len(expected) == size
        torch.testing.assert_close(program(*exported.inputs(part).values()), expected)
    assert expected.abs().max() > 0


@dataclass(frozen=True)
class _Plain(Tiny):
    """Has any model of four inputs."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        return {"error": model(batch[0]) - batch[1]}


class _Masked(nn.Module):
    def forward(self, values: Tensor, *, mask: Tensor) -> dict[str, Tensor]:
        return {"sums": (values * mask).sum(1), "first": values[:, 0]}


@dataclass(frozen=True)
class _Padded(Tiny):
    """Has batches that are dicts, and a model with keyword arguments and two outputs."""

    def build_model(self) -> nn.Module:
        return _Masked()

    def prepare(self, batch: Any, training: bool) -> Any:
        return {**batch, "values": batch["values"] * 2}

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        output = model(batch["values"], mask=batch["mask"])
        return {"error": output["sums"] - batch["target"]}


def test_inputs_have_the_names_of_the_batch_and_targets_are_left_out() -> None:
    batch = {
        "target": torch.tensor([1.0, 2.0]),
        "mask": torch.tensor([[True, False], [True, True]]),
        "values": torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
    }
    exported = export_program(_Padded(), _Masked(), batch)
    assert exported.used == {"mask": 1, "values": 2}
    output = exported.program.module()(*exported.inputs(batch).values())
    assert {name: value.tolist() for name, value in output.items()} == {
        "sums": [2.0, 14.0],
        "first": [2.0, 6.0],
    }


@dataclass(frozen=True)
class _Shifted(Tiny):
    """Computes the inputs of the model in `losses`."""

    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        inputs_B4, targets_B = batch[0] + 1, batch[1].double().float() * 2
        return {"error": model(inputs_B4) - targets_B}


def test_what_statistics_computes_before_the_model_is_exported() -> None:
    task = _Shifted()
    batch = tuple(tensor[:5] for tensor in task.validation_dataset(Path()).tensors)
    model = task.build_model().eval()
    exported = export_program(task, model, batch)
    assert exported.used == {"inputs": 0}
    torch.testing.assert_close(exported.program.module()(batch[0]), model(batch[0] + 1))


# What cannot be exported.


class _Branches(nn.Module):
    def forward(self, inputs_B4: Tensor) -> Tensor:
        return inputs_B4.sum(1) if inputs_B4.sum() > 0 else inputs_B4.mean(1)


class _Fixed(nn.Module):
    def forward(self, inputs_B4: Tensor) -> Tensor:
        return inputs_B4.view(5, 2, 2).sum((1, 2))


class _Numpy(nn.Module):
    def forward(self, inputs_B4: Tensor) -> Tensor:
        return torch.from_numpy(inputs_B4.numpy().sum(1))


class _Whole(nn.Module):
    def part(self, inputs_B4: Tensor) -> Tensor:
        return inputs_B4.sum(1)


@dataclass(frozen=True)
class _Parts(Tiny):
    def losses(self, model: nn.Module, batch: Any) -> dict[str, Tensor]:
        assert isinstance(model, _Whole)
        return {"error": model.part(batch[0]) - batch[1]}


@dataclass(frozen=True)
class _Invented(_Plain):
    """Gives the model nothing of the examples."""

    def prepare(self, batch: Any, training: bool) -> Any:
        return torch.ones(batch[0].shape[0], 4), batch[1]


def _scripted() -> list[nn.Module]:
    """Return a scripted, a traced, and a partly scripted model."""
    layer = nn.Linear(4, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch advises against its TorchScript
        scripted = torch.jit.script(layer)
        traced = torch.jit.trace(layer, torch.zeros(2, 4))
    return [scripted, traced, nn.Sequential(scripted, nn.Flatten(0))]


_OF_SCRIPTS = (
    "): leave out torch.jit.script() and torch.jit.trace() in build_model(), and export this run "
    "with --anyway, whose weights have the same names without them"
)
# fmt: off
_TASKS = [
    *((_Plain(), model, _OF_SCRIPTS) for model in _scripted()),
    (_Plain(), _Branches(), "task _Plain: the model cannot be exported (Could not guard on "
     "data-dependent expression Eq(u0, 1) (unhinted: Eq(u0, 1)).  (Size-like symbols: none)): "
     "its code branches on values of tensors: use torch.where("),
    (_Plain(), _Fixed(), "Constraints violated (batch)!"),
    (_Plain(), _Fixed(), "): its code fixes the number of examples: write x.shape[0] "),
    (_Plain(), _Numpy(), "): use only operations of torch on tensors there, without NumPy"),
    (_Parts(), _Whole(), "task _Parts: statistics() never calls the model as a whole, so it "),
    (_Invented(), _Numpy(), "_Invented: prepare() and statistics() give the model nothing of "),
]
# fmt: on


@pytest.mark.parametrize(("task", "model", "message"), _TASKS)
def test_what_cannot_be_exported_is_one_line(
    task: Task, model: nn.Module, message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    batch = tuple(tensor[:5] for tensor in Tiny().validation_dataset(Path()).tensors)
    with pytest.raises(WrongUse) as raised:
        export_program(task, model.eval(), batch)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert capfd.readouterr() == ("", "")
