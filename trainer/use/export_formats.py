"""Write an exported model in a format, and load it again as another program does."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from trainbox.contract.errors import WrongUse
from trainer.data.nested import tensors_in
from trainer.use.export_program import Exported, errors_of_torch

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
