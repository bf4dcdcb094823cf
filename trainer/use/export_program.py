"""Export how a task calls its model in a validation, as a program of the examples alone."""

import contextlib
import copy
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


class _Called(BaseException):
    """A call of the model, with its arguments."""


def _call(_model: nn.Module, *args: Any, **kwargs: Any) -> None:
    raise _Called(args, kwargs)


def first_call(task: Task, model: nn.Module, batch: Any) -> Any:
    """Return the arguments of the first call of the model in a validation of `batch`.

    They are a tuple and a dict. `batch` is as the dataset returns it.

    Raises:
        WrongUse: The task's `statistics` does not call the model.
    """
    # This copy has the tensors and the methods of the model, but its call ends `statistics`.
    stand_in = copy.copy(model)
    stand_in.__class__ = type(type(model).__name__, (type(model),), {"__call__": _call})
    try:
        task.statistics(stand_in, task.prepare(batch, training=False))
    except _Called as call:
        return call.args
    raise WrongUse(
        f"task {type(task).__name__}: statistics() never calls the model as a whole, so it is "
        "unknown what to export: call model(...) there, and the parts of the model in its forward()"
    )


class PreparedModel(nn.Module):
    """What a validation computes with a batch up to the output of the model, from its tensors.

    `used` has the indices of these tensors in `batch`. All other tensors, such as labels, become
    zeros. If it is not `whole`, the result is the arguments of the model.
    """

    def __init__(
        self, task: Task, model: nn.Module, batch: Any, used: Sequence[int], whole: bool = True
    ) -> None:
        super().__init__()
        self.model = model
        self._task, self._batch, self._used, self._whole = task, batch, list(used), whole

    def forward(self, *inputs: Tensor) -> Any:
        examples, given = inputs[0].shape[0], dict(zip(self._used, inputs, strict=True))
        tensors = iter(
            [
                given[i]
                if i in given
                else inputs[0].new_zeros((examples, *tensor.shape[1:]), dtype=tensor.dtype)
                for i, tensor in enumerate(tensors_in(self._batch))
            ]
        )
        batch = mapped(lambda _: next(tensors), self._batch)
        args, kwargs = first_call(self._task, self.model, batch)
        return self.model(*args, **kwargs) if self._whole else (args, kwargs)


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
    tensors = tensors_in(batch)
    preparation = PreparedModel(task, model, batch, range(len(tensors)), whole=False)
    prepared = _export(preparation, tensors, f"task {name}: prepare() or statistics()")
    prepared.graph.eliminate_dead_code()
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
            f"task {name}: prepare() and statistics() give the model nothing of the examples: call "
            "it first with tensors that depend on the batch"
        )
    chosen = PreparedModel(task, model, batch, used)
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
