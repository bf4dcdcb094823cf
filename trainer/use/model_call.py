"""Find how a task calls its model in a validation, as a module of the examples alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from trainbox.contract.errors import WrongUse
from trainbox.task import Task
from trainer.data.nested import mapped, tensors_in

# Shape suffix: B examples of a batch.


@dataclass(frozen=True)
class ModelCall:
    """A call of the model in the task's `statistics`.

    Attributes:
        arguments: The positional and the keyword arguments, which contain tensors of the batch.
        positions: The index of each tensor of the prepared batch, by the tensor's id.
        output: What the model returned.
    """

    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    positions: dict[int, int]
    output: Any


@torch.no_grad()
def find_call(task: Task, model: nn.Module, batch: Any) -> ModelCall:
    """Return the first call of the model with nothing but tensors of the prepared `batch`.

    `batch` is as the dataset returns it. The model must be in evaluation mode.

    Raises:
        WrongUse: `statistics` has no such call, or the model returns no tensor.
    """
    prepared = task.prepare(batch, training=False)
    positions = {id(tensor): index for index, tensor in enumerate(tensors_in(prepared))}
    found: list[ModelCall] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        given = [id(tensor) for tensor in tensors_in((args, kwargs))]
        if not found and given and set(given) <= positions.keys():
            # The task may change the output later.
            found.append(ModelCall((args, kwargs), positions, mapped(Tensor.clone, output)))

    hook = model.register_forward_hook(note, with_kwargs=True)
    try:
        task.statistics(model, prepared)
    finally:
        hook.remove()
    if not found:
        raise WrongUse(
            f"task {type(task).__name__}: statistics() never calls the model with only tensors of "
            "the batch, so the batch cannot be given to the model alone: compute the model's "
            "inputs in prepare() or in the model's forward()"
        )
    if not tensors_in(found[0].output):
        raise WrongUse(
            f"task {type(task).__name__}: the model returned {type(found[0].output).__name__}: "
            "return a tensor, or a tuple, list or dict of tensors"
        )
    return found[0]


class Preparation(nn.Module):
    """The task's `prepare` for validation, as a function of some tensors of a batch.

    It returns the arguments of the model. `used` has the indices of these tensors in `batch`. All
    other tensors, such as labels, become zeros.
    """

    def __init__(self, task: Task, call: ModelCall, batch: Any, used: Sequence[int]) -> None:
        super().__init__()
        self._task, self._call, self._batch, self._used = task, call, batch, list(used)

    def forward(self, *inputs: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
        given = dict(zip(self._used, inputs, strict=True))
        examples = inputs[0].shape[0]
        whole = iter(
            [
                given[i]
                if i in given
                else inputs[0].new_zeros((examples, *tensor.shape[1:]), dtype=tensor.dtype)
                for i, tensor in enumerate(tensors_in(self._batch))
            ]
        )
        batch = mapped(lambda _: next(whole), self._batch)
        prepared = tensors_in(self._task.prepare(batch, training=False))
        args, kwargs = mapped(
            lambda tensor: prepared[self._call.positions[id(tensor)]], self._call.arguments
        )
        return args, kwargs


class PreparedModel(nn.Module):
    """The model behind the task's `prepare`: the examples of a dataset to the model's output."""

    def __init__(self, preparation: Preparation, model: nn.Module) -> None:
        super().__init__()
        self.preparation, self.model = preparation, model

    def forward(self, *inputs: Tensor) -> Any:
        args, kwargs = self.preparation(*inputs)
        return self.model(*args, **kwargs)
