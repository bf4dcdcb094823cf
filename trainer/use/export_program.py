"""Export how a task calls its model in a validation, as a program of the examples alone.

Each format writes the program to a file, and loads it again as another program does.
"""

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from trainbox.errors import Failure, WrongUse, text_of
from trainbox.task import Task
from trainbox.tensor_trees import mapped, tensors_in

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
    "": (
        "use only operations of torch on tensors there, without NumPy, .item() and "
        "pack_padded_sequence()"
    ),
}
_OF_SCRIPTS = (
    "leave out torch.jit.script() and torch.jit.trace() in build_model(), and export this run with "
    "--anyway, whose weights have the same names without them"
)

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
    remedy = _OF_SCRIPTS if any(map(_is_scripted, model.modules())) else None
    tensors = tensors_in(batch)
    preparation = PreparedModel(task, model, batch, range(len(tensors)), whole=False)
    prepared = _export(preparation, tensors, f"task {name}: prepare() or statistics()", remedy)
    # Follow the arguments of the model back to the inputs, but not to the number of examples.
    needed = {prepared.graph.output_node()}
    for node in reversed(prepared.graph.nodes):
        if node in needed and node.target is not torch.ops.aten.sym_size.int:
            needed.update(node.all_input_nodes)
    # Constants are placeholders as well, before the inputs.
    placeholders = [node for node in prepared.graph.nodes if node.op == "placeholder"]
    used = [i for i, node in enumerate(placeholders[-len(tensors) :]) if node in needed]
    if not used:
        raise WrongUse(
            f"task {name}: prepare() and statistics() give the model nothing of the examples: call "
            "it first with tensors that depend on the batch"
        )
    chosen = PreparedModel(task, model, batch, used)
    program = _export(chosen, [tensors[index] for index in used], f"task {name}: the model", remedy)
    return Exported(program, _named(batch, used))


def _named(batch: Any, used: list[int]) -> dict[str, int]:
    """Name tensors by the keys of a dict of tensors, or else `inputs`, or `inputs_0` and so on."""
    names = ["inputs"] if len(used) == 1 else [f"inputs_{i}" for i in range(len(used))]
    if isinstance(batch, dict) and all(
        str(key).isidentifier() and isinstance(value, Tensor) for key, value in batch.items()
    ):
        names = [str(list(batch)[index]) for index in used]
    return dict(zip(names, used, strict=True))


def _is_scripted(module: nn.Module) -> bool:
    return isinstance(module, torch.jit.ScriptModule)


def _export(
    module: nn.Module, inputs: list[Tensor], what: str, remedy: str | None
) -> ExportedProgram:
    """Export `module` with a dynamic batch dimension, or raise WrongUse with the `remedy`."""
    batch = torch.export.Dim("batch")
    with errors_of_torch(f"{what} cannot be exported", remedy):
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
        lines = text_of(cause).strip().splitlines() or [type(cause).__name__]
        remedy = remedy or next(text for sign, text in _REMEDIES.items() if sign in text_of(error))
        raise WrongUse(f"{what} ({lines[0][:_LONGEST_REASON].rstrip('. ')}): {remedy}") from error
    finally:
        logging.disable(logging.NOTSET)


# Formats.

Loaded = Callable[[Mapping[str, Tensor]], list[Tensor]]

# Lines of Python that load a file and run it on examples of zeros.
_PT2 = """\
import torch
model = torch.export.load("model.pt2").module()
{zeros}
with torch.no_grad():
    print(model({arguments}))"""
_ONNX = """\
import numpy, onnxruntime
model = onnxruntime.InferenceSession("model.onnx")
{zeros}
print(model.run(None, {{{arguments}}}))"""


@dataclass(frozen=True)
class Format:
    """A format of exported models.

    Attributes:
        file: The name of the file.
        packages: Packages that the user has to install.
        write: Writes the model to a file.
        load: Loads a file, and returns a function from the inputs to the output's tensors.
        program: Lines of Python with `{zeros}`, which make the inputs, and `{arguments}`.
        zeros: The line for an input with `{name}`, `{shape}` and `{dtype}`.
        argument: How the input `{name}` is passed.
    """

    file: str
    packages: tuple[str, ...]
    write: Callable[[Exported, IO[bytes]], None]
    load: Callable[[Path], Loaded]
    program: str
    zeros: str
    argument: str

    def lines(self, inputs: Mapping[str, Tensor]) -> str:
        """Return the lines of Python that load the file and run it on 8 examples of zeros."""
        zeros = [
            self.zeros.format(name=name, shape=(8, *tensor.shape[1:]), dtype=dtype_name(tensor))
            for name, tensor in inputs.items()
        ]
        arguments = [self.argument.format(name=name) for name in inputs]
        return self.program.format(zeros="\n".join(zeros), arguments=", ".join(arguments))


def dtype_name(tensor: Tensor) -> str:
    """Return the type as NumPy names it, such as `uint8`."""
    return str(tensor.dtype).removeprefix("torch.")


def check_packages(to: str) -> None:
    """Raise WrongUse if a package for the format `to` is missing."""
    packages = FORMATS[to].packages
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise WrongUse(
            f"--to {to} needs packages that are not installed ({', '.join(missing)}): write "
            f"{', '.join(packages)} to the lines of a file my.txt and install them with `make "
            f"extra-venv REQUIREMENTS=my.txt`, or with `pip install {' '.join(packages)}`"
        )


def _load_pt2(path: Path) -> Loaded:
    with path.open("rb") as file:
        module = torch.export.load(file).module()
    return torch.no_grad()(lambda inputs: tensors_in(module(*inputs.values())))


def _write_onnx(exported: Exported, file: IO[bytes]) -> None:
    with errors_of_torch("torch cannot write the model as ONNX", "use --to pt2"):
        program = torch.onnx.export(
            exported.program,
            dynamo=True,
            input_names=[*exported.used],
            dynamic_shapes=(tuple({0: "batch"} for _ in exported.used),),
            verbose=False,
        )
    assert program is not None
    file.write(program.model_proto.SerializeToString())


def _load_onnx(path: Path) -> Loaded:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])

    def run(inputs: Mapping[str, Tensor]) -> list[Tensor]:
        found = session.run(None, {name: tensor.numpy() for name, tensor in inputs.items()})
        return [torch.from_numpy(value) for value in found]

    return run


FORMATS = {
    "pt2": Format(
        "model.pt2",
        (),
        lambda exported, file: torch.export.save(exported.program, file),
        _load_pt2,
        _PT2,
        "{name} = torch.zeros({shape}, dtype=torch.{dtype})",
        "{name}",
    ),
    "onnx": Format(
        "model.onnx",
        ("onnx", "onnxscript", "onnxruntime"),
        _write_onnx,
        _load_onnx,
        _ONNX,
        '{name} = numpy.zeros({shape}, dtype="{dtype}")',
        '"{name}": {name}',
    ),
}
