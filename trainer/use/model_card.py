"""Describe an exported model in `model.md`: its origin, and how to load its file."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from trainbox.classification import Classification
from trainbox.contract.markup import escaped
from trainbox.task import Task
from trainer.run.compare import listed_changes
from trainer.track.runs import params_of
from trainer.use.export_formats import Format
from trainer.use.stored_model import StoredModel

CARD = "model.md"
_NO_LICENCE = (
    "not set (the licences of the data and of the initial weights may limit it; `--licence NAME` "
    "sets it)"
)


@dataclass(frozen=True)
class ExportedFile:
    """A file whose outputs equal those of the model.

    Attributes:
        names: The names of `inputs`, which are examples of the validation data.
        sizes: The numbers of examples with which the outputs were compared.
        largest: The largest difference between the outputs of the file and of the model.
    """

    path: Path
    to: Format
    names: Sequence[str]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    sizes: Sequence[int]
    largest: float


def card_text(model: StoredModel, file: ExportedFile, checkpoint: str, licence: str | None) -> str:
    """Return the card of `file` as Markdown."""
    record, step = model.record, model.weights.step
    manifest, config = record.manifest, record.config
    build, packages = manifest.get("build") or {}, manifest.get("packages") or {}
    with file.path.open("rb") as opened:
        file_digest = hashlib.file_digest(opened, "sha256").hexdigest()
    rows = {
        "Task": _code(config.task),
        "Run": f"{_code(record.path.name)}, id {_code(record.manifest['run_id'])}",
        "Checkpoint": f"{checkpoint}, step {step}",
        "Licence": _shown(licence) if licence else _NO_LICENCE,
        "SHA-256 of the file": _code(file_digest),
        "Digest of the weights": _code(model.digest),
        **{
            f"Digest of the {name} data": _code(value)
            for name, value in manifest.get("data", {}).items()
        },
        "Commit of Trainbox": _code(build.get("revision")),
        "Image": _code(manifest.get("image_digest")),
        "Versions": _shown(", ".join(f"{name} {version}" for name, version in packages.items())),
        "Device and precision of the training": _shown(
            f"{(manifest.get('device') or {}).get('type')}, {config.precision}"
        ),
        "Changed since the training": _shown(listed_changes(model.changed)),
    }
    figures = record.figures_at(step)
    metrics = {
        name: _shown(value)
        for name, value in (figures or {}).items()
        if not isinstance(value, list)
    }
    settings = {name: _code(value) for name, value in params_of(record.values).items()}
    parts = [
        f"# {_shown(record.path.name)}",
        "## Load the model",
        f"In the folder of `{file.to.file}`:",
        "\n".join(["```python", *file.to.lines(file.names, file.inputs), "```"]),
        *_interface(model.job.task, file),
        "## Origin",
        _table("Name", "Value", {name: text for name, text in rows.items() if text}),
        "## Metrics",
        f"The validation of the training at step {step}:"
        if figures
        else f"The training has no validation at step {step}.",
        _table("Metric", "Value", metrics),
        "## Settings",
        _table("Setting", "Value", settings),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def described(tensor: Tensor) -> str:
    """Return the type and the shape of a batch, such as `float32 (batch, 10)`."""
    shape = ", ".join(["batch", *map(str, tensor.shape[1:])]) if tensor.ndim else ""
    return f"{str(tensor.dtype).removeprefix('torch.')} ({shape})"


def value_range(tensor: Tensor) -> str:
    """Return the smallest and the largest value as a text, or "" if the tensor has none."""
    if tensor.is_complex() or not tensor.numel():
        return ""
    least, most = tensor.min().item(), tensor.max().item()
    return f", from {least:.4g} to {most:.4g} in the compared examples"


def _interface(task: Task, file: ExportedFile) -> list[str]:
    """Return what the inputs and the outputs are."""
    lines = [
        f"- `{name}`: {described(tensor)}{value_range(tensor)}"
        for name, tensor in zip(file.names, file.inputs, strict=True)
    ]
    lines += [f"- output: {described(tensor)}" for tensor in file.outputs]
    parts = ["## Inputs and outputs", "\n".join(lines)]
    if isinstance(task, Classification) and task.class_names:
        names = ", ".join(f"{index}: {_shown(name)}" for index, name in enumerate(task.class_names))
        parts += [f"The columns of the output are logits of the classes: {names}."]
    return [
        *parts,
        "The inputs are examples as the dataset of the task returns them. The file contains "
        "`prepare` of the task, such as a normalisation. `batch` is any number from 1.",
        f"The loaded file was compared with the model in evaluation mode on "
        f"{' and on '.join(map(str, file.sizes))} validation examples. The largest difference is "
        f"{file.largest:.3g}.",
    ]


def _table(first: str, second: str, rows: Mapping[str, str]) -> str:
    """Return a table of Markdown, or nothing without rows. The values are Markdown."""
    if not rows:
        return ""
    lines = [f"| {first} | {second} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {_shown(name)} | {value} |" for name, value in rows.items())])


def _shown(value: object) -> str:
    """Return a value of the run as one line of text."""
    return escaped(" ".join(str(value).split()))


def _code(value: object) -> str:
    """Return a value of the run as code, or as text if it has special characters."""
    text = _shown("" if value is None else value)
    return f"`{text}`" if text and text == str(value) else text
