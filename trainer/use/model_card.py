"""Describe an exported model in `model.md`: its origin, and how to load its file."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from trainbox.classification import Classification
from trainbox.contract.markup import escaped
from trainer.run.compare import listed_changes
from trainer.track.runs import params_of, tags_of
from trainer.use.export_formats import dtype_name
from trainer.use.stored_model import StoredModel


def card_text(
    model: StoredModel,
    about: Mapping[str, str],
    lines: str,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[Tensor],
) -> str:
    """Return the card of an exported model as Markdown.

    `about` has rows about the file, and `lines` are the lines of Python that load it. The model
    has these `outputs` for the `inputs`, which are examples of the validation data.
    """
    record, task, step = model.record, model.job.task, model.step
    metrics = _metrics(model)
    interface = [f"- `{name}`: {described(x)}{value_range(x)}" for name, x in inputs.items()]
    interface += [f"- output: {described(tensor)}" for tensor in outputs]
    if isinstance(task, Classification) and task.class_names:
        classes = ", ".join(f"{k}: {_shown(name)}" for k, name in enumerate(task.class_names))
        interface += [f"- the columns of the output are logits of the classes: {classes}"]
    parts = [
        f"# {_shown(record.path.name)}",
        "## Load the model",
        f"In the folder of the file:\n\n```python\n{lines}\n```",
        "## Inputs and outputs",
        "\n".join(interface),
        "The inputs are examples as the dataset of the task returns them. The file contains "
        "`prepare` of the task, such as a normalisation. `batch` is any number from 1.",
        "## Origin",
        _table(
            {
                **model.origin,
                "run": record.path.name,
                "changed": listed_changes(model.changed),
                **about,
                **tags_of(record.manifest),
            }
        ),
        "## Metrics",
        f"The validation of the training at step {step}:"
        if metrics
        else f"The training has no validation at step {step}.",
        _table(metrics),
        "## Settings",
        _table(params_of(record.values)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metrics(model: StoredModel) -> Mapping[str, Any]:
    """Return the metrics of the validation at the step of the weights, or none.

    The checkpoint has those of the best step. Its digest is verified, and metrics.jsonl has none.
    """
    if model.progress["best_step"] == model.step:
        metrics: Mapping[str, Any] = model.progress["best_metrics"]
        return metrics
    figures = model.record.figures_at(model.step) or {}
    return {name: value for name, value in figures.items() if not isinstance(value, list)}


def described(tensor: Tensor) -> str:
    """Return the type and the shape of a batch, such as `float32 (batch, 10)`."""
    shape = ", ".join(["batch", *map(str, tensor.shape[1:])]) if tensor.ndim else ""
    return f"{dtype_name(tensor)} ({shape})"


def value_range(tensor: Tensor) -> str:
    """Return the smallest and the largest value as a text, or "" if the tensor has none."""
    if tensor.is_complex() or not tensor.numel():
        return ""
    least, most = tensor.min().item(), tensor.max().item()
    return f", from {least:.4g} to {most:.4g} in the compared examples"


def _table(rows: Mapping[str, Any]) -> str:
    """Return a table of Markdown with the values that are not empty, or nothing without rows."""
    lines = [f"| {_shown(name)} | {_shown(value)} |" for name, value in rows.items() if value != ""]
    return "\n".join(["| Name | Value |", "|---|---|", *lines]) if lines else ""


def _shown(value: object) -> str:
    """Return a value of the run as one line of text."""
    return escaped(" ".join(str(value).split()))
