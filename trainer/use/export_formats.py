"""Write an exported model in a format, and load it again as another program does."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from trainbox.contract.errors import WrongUse
from trainer.data.nested import tensors_in
from trainer.use.export_program import Exported, first_line, quiet

Loaded = Callable[[Sequence[Tensor]], list[Tensor]]


@dataclass(frozen=True)
class Format:
    """A format of exported models.

    Attributes:
        file: The name of the file.
        packages: Packages that the user has to install.
        write: Writes the model to a file.
        load: Loads a file, and returns a function from the inputs to the output's tensors.
        imports: The lines of Python that load the file as `model`.
        zeros: Returns an expression for zeros of a shape, with the type of a tensor.
        run: Returns the lines that print the output for inputs of these names.
    """

    file: str
    packages: tuple[str, ...]
    write: Callable[[Exported, IO[bytes]], None]
    load: Callable[[Path], Loaded]
    imports: tuple[str, str]
    zeros: Callable[[tuple[int, ...], Tensor], str]
    run: Callable[[Sequence[str]], list[str]]

    def lines(self, names: Sequence[str], inputs: Sequence[Tensor]) -> list[str]:
        """Return the lines of Python that load the file and run it on 8 examples of zeros."""
        zeros = [
            f"{name} = {self.zeros((8, *tensor.shape[1:]), tensor)}"
            for name, tensor in zip(names, inputs, strict=True)
        ]
        return [*self.imports, *zeros, *self.run(names)]


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


def _write_pt2(exported: Exported, file: IO[bytes]) -> None:
    torch.export.save(exported.program, file)


def _load_pt2(path: Path) -> Loaded:
    with path.open("rb") as file:
        module = torch.export.load(file).module()
    return torch.no_grad()(lambda inputs: tensors_in(module(*inputs)))


def _write_onnx(exported: Exported, file: IO[bytes]) -> None:
    try:
        with quiet():
            program = torch.onnx.export(
                exported.program,
                dynamo=True,
                input_names=exported.names,
                dynamic_shapes=(tuple({0: "batch"} for _ in exported.names),),
                verbose=False,
            )
    except torch.onnx.OnnxExporterError as error:
        logging.getLogger(__name__).exception("torch.onnx.export failed")
        # The error names only a step of the export. The first cause is what went wrong there.
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise WrongUse(
            f"torch cannot write the model as ONNX ({first_line(cause)}): use --to pt2"
        ) from error
    assert program is not None
    file.write(program.model_proto.SerializeToString())


def _load_onnx(path: Path) -> Loaded:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    names = [found.name for found in session.get_inputs()]

    def run(inputs: Sequence[Tensor]) -> list[Tensor]:
        given = {name: tensor.numpy() for name, tensor in zip(names, inputs, strict=True)}
        return [torch.from_numpy(value) for value in session.run(None, given)]

    return run


def _run_onnx(names: Sequence[str]) -> list[str]:
    given = ", ".join(f'"{name}": {name}' for name in names)
    return [f"print(model.run(None, {{{given}}}))"]


FORMATS = {
    "pt2": Format(
        "model.pt2",
        (),
        _write_pt2,
        _load_pt2,
        ("import torch", 'model = torch.export.load("model.pt2").module()'),
        lambda shape, tensor: f"torch.zeros({shape}, dtype={tensor.dtype})",
        lambda names: ["with torch.no_grad():", f"    print(model({', '.join(names)}))"],
    ),
    "onnx": Format(
        "model.onnx",
        ("onnx", "onnxscript", "onnxruntime"),
        _write_onnx,
        _load_onnx,
        ("import numpy, onnxruntime", 'model = onnxruntime.InferenceSession("model.onnx")'),
        lambda shape, tensor: f'numpy.zeros({shape}, dtype="{tensor.numpy().dtype}")',
        _run_onnx,
    ),
}
