"""Write `model.md`: the origin of an exported model, and how to load its file."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainbox.classification import Classification
from trainbox.contract.files import replacing
from trainbox.task import Task
from trainer.run.compare import listed_changes
from trainer.run.run_record import RunRecord, StoredWeights
from trainer.track.runs import params_of
from trainer.use.export_formats import Format

CARD = "model.md"
_NO_LICENCE = (
    "not set (the licences of the data and of the initial weights may limit it; `--licence NAME` "
    "sets it)"
)


@dataclass(frozen=True)
class Card:
    """What the card of an exported model contains.

    Attributes:
        figures: The metrics and tables of the training at the step of the weights, or None.
        names: The names of `inputs`, which are examples of the validation data.
        largest: The largest difference between the outputs of the file and of the model.
        sizes: The numbers of examples with which the outputs were compared.
        changed: What differs from the run's start, `{name: (old, new)}`.
    """

    to: Format
    stored: RunRecord
    task: Task
    checkpoint: str
    weights: StoredWeights
    weights_digest: str
    figures: Mapping[str, Any] | None
    names: Sequence[str]
    inputs: Sequence[Tensor]
    outputs: Sequence[Tensor]
    largest: float
    sizes: Sequence[int]
    changed: Mapping[str, tuple[Any, Any]]
    licence: str | None


def write_card(out: Path, card: Card, exported: Path) -> None:
    """Write the card of the file `exported` to the folder `out`, or replace an earlier one.

    Raises:
        StorageFailure: A file of the run is damaged.
        OSError: The card cannot be written.
    """
    with exported.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    with replacing(out / CARD) as file:
        file.write(_card_text(card, digest).encode(errors="backslashreplace"))


def _card_text(card: Card, file_digest: str) -> str:
    """Return the card as Markdown."""
    manifest, config = card.stored.manifest, card.stored.config
    build, data = manifest.get("build") or {}, manifest.get("data") or {}
    packages = manifest.get("packages") or {}
    rows = {
        "Task": f"`{config.task}`",
        "Run": f"`{card.stored.path.name}`, id `{card.stored.run_id}`",
        "Checkpoint": f"{card.checkpoint}, step {card.weights.step}",
        "Licence": card.licence or _NO_LICENCE,
        "SHA-256 of the file": f"`{file_digest}`",
        "Digest of the weights": f"`{card.weights_digest}`",
        **{f"Digest of the {name} data": f"`{value}`" for name, value in data.items()},
        "Commit of Trainbox": _code(build.get("revision")),
        "Image": _code(manifest.get("image_digest")),
        "Versions": ", ".join(f"{name} {version}" for name, version in packages.items()),
        "Device and precision of the training": (
            f"{(manifest.get('device') or {}).get('type')}, {config.precision}"
        ),
    }
    if card.changed:
        rows["Changed since the training"] = listed_changes(card.changed)
    metrics = {
        name: value for name, value in (card.figures or {}).items() if not isinstance(value, list)
    }
    settings = params_of(card.stored.values)
    parts = [
        f"# {card.stored.path.name}",
        "## Load the model",
        f"In the folder of `{card.to.file}`:",
        "\n".join(["```python", *card.to.lines(card.names, card.inputs), "```"]),
        *_interface(card),
        "## Origin",
        _table("Name", "Value", {name: text for name, text in rows.items() if text}),
        "## Metrics",
        f"The validation of the training at step {card.weights.step}:"
        if card.figures
        else f"The training has no validation at step {card.weights.step}.",
        _table("Metric", "Value", {name: f"{value}" for name, value in metrics.items()}),
        "## Settings",
        _table("Setting", "Value", {name: f"`{value}`" for name, value in settings.items()}),
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


def _interface(card: Card) -> list[str]:
    """Return what the inputs and the outputs are."""
    lines = [
        f"- `{name}`: {described(tensor)}{value_range(tensor)}"
        for name, tensor in zip(card.names, card.inputs, strict=True)
    ]
    lines += [f"- output: {described(tensor)}" for tensor in card.outputs]
    parts = [
        "## Inputs and outputs",
        "\n".join(lines),
        "The inputs are examples as the dataset of the task returns them. The file contains "
        "`prepare` of the task, such as a normalisation. `batch` is any number from 1.",
        f"The loaded file was compared with the model in evaluation mode on "
        f"{' and on '.join(map(str, card.sizes))} validation examples. The largest difference is "
        f"{card.largest:.3g}.",
    ]
    if isinstance(card.task, Classification) and card.task.class_names:
        names = ", ".join(f"{index}: {name}" for index, name in enumerate(card.task.class_names))
        parts.insert(2, f"The columns of the output are logits of the classes: {names}.")
    return parts


def _code(value: Any) -> str:
    return f"`{value}`" if value else ""


def _table(first: str, second: str, rows: Mapping[str, str]) -> str:
    """Return a table of Markdown, or nothing without rows."""
    if not rows:
        return ""
    lines = [f"| {first} | {second} |", "|---|---|"]
    lines += [f"| {_cell(name)} | {_cell(value)} |" for name, value in rows.items()]
    return "\n".join(lines)


def _cell(text: str) -> str:
    return " ".join(text.replace("|", "\\|").split())
