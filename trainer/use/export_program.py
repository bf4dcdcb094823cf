"""Export how a task calls its model in a validation, as a program of the examples alone."""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from trainbox.contract.errors import Failure, WrongUse
from trainbox.task import Task
from trainer.data.nested import mapped, tensors_in

_LONGEST_REASON = 300  # characters of torch's error; the message has a remedy after it
# What a user can do, by a part of torch's error.
_REMEDIES = {
    "Constraints violated": (
        "its code fixes the number of examples: write x.shape[0] instead of len(x) or a number, as "
        "in x.view(x.shape[0], -1)"
    ),
    "data-dependent": (
        "its code branches on values of tensors: use torch.where(condition, a, b) instead of `if`"
    ),
    "": "use only operations of torch on tensors there, without NumPy and .item()",
}

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


class PreparedModel(nn.Module):
    """The task's `prepare` for validation and then the model, as a function of tensors of a batch.

    `used` has the indices of these tensors in `batch`. All other tensors, such as labels, become
    zeros. Without a model, the result is the arguments of the model.
    """

    def __init__(
        self, task: Task, call: ModelCall, batch: Any, used: Sequence[int], model: nn.Module | None
    ) -> None:
        super().__init__()
        self._task, self._call, self._batch, self._used = task, call, batch, list(used)
        self.model = model

    def forward(self, *inputs: Tensor) -> Any:
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
        return (args, kwargs) if self.model is None else self.model(*args, **kwargs)


@dataclass(frozen=True)
class Exported:
    """An exported model.

    Attributes:
        program: Computes the model's output from the examples, in any number from 1.
        used: The name of each of its inputs, with its index among the tensors of a batch.
    """

    program: ExportedProgram
    used: dict[str, int]

    def inputs(self, batch: Any) -> dict[str, Tensor]:
        """Return the inputs of the program in a batch of the dataset."""
        tensors = tensors_in(batch)
        return {name: tensors[index] for name, index in self.used.items()}


@torch.no_grad()
def export_program(task: Task, model: nn.Module, batch: Any) -> Exported:
    """Export `prepare` and the model, which must be in evaluation mode.

    `batch` has two examples of the dataset or more. Tensors that do not reach the model, such as
    labels, are not inputs of the program.

    Raises:
        WrongUse: The task or torch cannot do this.
    """
    name = type(task).__name__
    call = find_call(task, model, batch)
    tensors = tensors_in(batch)
    preparation = PreparedModel(task, call, batch, range(len(tensors)), None)
    prepared = _export(preparation, tensors, f"task {name}: prepare()")
    placeholders = [node for node in prepared.graph.nodes if node.op == "placeholder"]
    # Constants of prepare() are placeholders as well, before the inputs. Of an input, only the
    # number of examples may be used.
    size = torch.ops.aten.sym_size.int
    used = [
        index
        for index, node in enumerate(placeholders[-len(tensors) :])
        if any(user.target is not size for user in node.users)
    ]
    if not used:
        raise WrongUse(
            f"task {name}: prepare() gives the model nothing of the examples: return tensors that "
            "depend on its batch"
        )
    chosen = PreparedModel(task, call, batch, used, model)
    program = _export(chosen, [tensors[index] for index in used], f"task {name}: the model")
    return Exported(program, _named(batch, used))


def _named(batch: Any, used: list[int]) -> dict[str, int]:
    """Name tensors by the keys of a dict of tensors, or else `inputs`, or `inputs_0` and so on."""
    names = ["inputs"] if len(used) == 1 else [f"inputs_{i}" for i in range(len(used))]
    if isinstance(batch, dict) and all(
        str(key).isidentifier() and isinstance(value, Tensor) for key, value in batch.items()
    ):
        names = [str(list(batch)[index]) for index in used]
    return dict(zip(names, used, strict=True))


def _export(module: nn.Module, inputs: list[Tensor], what: str) -> ExportedProgram:
    """Export `module` with a dynamic batch dimension, or raise WrongUse."""
    batch = torch.export.Dim("batch")
    with errors_of_torch(f"{what} cannot be exported"):
        return torch.export.export(
            module.eval(), tuple(inputs), dynamic_shapes=(tuple({0: batch} for _ in inputs),)
        )


@contextlib.contextmanager
def errors_of_torch(what: str, remedy: str | None = None) -> Iterator[None]:
    """Raise an error of the body as WrongUse, `what` and the reason, with the traceback in the log.

    The output, the logs and the warnings of torch are dropped: it prints a graph before an error.
    """
    logging.disable()
    try:
        with contextlib.redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except Failure:
        raise
    except Exception as error:  # torch and the task raise many types
        logging.disable(logging.NOTSET)
        logging.getLogger(__name__).exception(what)
        cause: BaseException = error
        # The error of an export to ONNX names only a step. The first cause is what went wrong.
        while isinstance(error, torch.onnx.OnnxExporterError) and cause.__cause__ is not None:
            cause = cause.__cause__
        lines = str(cause).strip().splitlines() or [type(cause).__name__]
        remedy = remedy or next(text for sign, text in _REMEDIES.items() if sign in str(error))
        raise WrongUse(f"{what} ({lines[0][:_LONGEST_REASON].rstrip('. ')}): {remedy}") from error
    finally:
        logging.disable(logging.NOTSET)
