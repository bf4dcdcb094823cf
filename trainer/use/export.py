"""Run one call of `export`: write the model of a stored run as a file without Trainbox.

The model computes on the CPU in float32. The file gets its name only after it was loaded and gave
the outputs of the model.
"""

import ast
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainbox.classification import Classification
from trainbox.disclosure.markup import cell, escaped_line
from trainbox.disclosure.recorded_values import flat, listed_changes, shown_value
from trainbox.disclosure.secret_rule import without_secrets
from trainbox.errors import ExitCode, Failure
from trainbox.files.regular_files import object_if_valid, replacing
from trainbox.options.config import CONTIGUOUS
from trainbox.tensor_trees import copied, take, tensors_in
from trainer.loop.build import build_inference
from trainer.loop.state import Inference
from trainer.use.export_program import (
    FORMATS,
    check_packages,
    dtype_name,
    export_program,
    first_call,
)
from trainer.use.per_example import LEVEL
from trainer.use.stored_model import VALIDATION, Request, StoredModel, opened

CARD, INPUTS = "model.md", "inputs.py"
# The largest difference, as a share of the largest output. Other kernels add in another order.
TOLERANCE = 1e-4
# Always allowed: the rounding of a sum of float32 values of about 1. Outputs near 0 may
# be the difference of such values.
ROUNDING = 1e-6
_NO_LICENCE = "not set (the licences of the data and of the initial weights may limit it)"
# Entries of the manifest that the card shows. `.` joins the names of nested objects.
_ORIGIN = re.compile(
    r"revision|build\..+|image_digest|python|packages\.(?:torch|trainbox)|cuda|cudnn|data\..+"
    r"|device\.(?:type|names)|machine\.cpu_model|plan\.(?:strategy|world_size)|init\..+"
)
_DIGEST = re.compile(r"(?:sha256:)?[0-9a-f]{7,64}(?:-dirty)?")
_EXAMPLES = 16  # of the validation data, to export and to compare


@dataclass(frozen=True, kw_only=True)
class ExportRequest(Request):
    """What to export, and where the files go.

    Attributes:
        to: A format of `FORMATS`.
        out: The folder of the files, or None for a folder in the run's folder.
        licence: The licence for the card, or None.
    """

    to: str
    out: Path | None
    licence: str | None


def export_run(request: ExportRequest) -> None:
    """Export the model of a run, compare the file with the model, and write its card.

    Raises:
        Failure: The loaded file has other outputs than the model. No file is written.
        WrongUse: The run or its model cannot be exported.
    """
    check_packages(request.to)
    to = FORMATS[request.to]
    out = request.out or request.run / "exports" / f"{request.checkpoint}-{request.to}"
    settings = {"precision": "fp32", "compile": False, "memory_format": CONTIGUOUS}
    with opened(request, out, "export.log", **settings) as run:
        job = build_inference(run.settings, run.task, run.strategy, request.data_dir, test=False)
        # The settings and the machine of the export are others on purpose.
        model = run.load(job, VALIDATION, relevant=("data.", "sources."))
        batch, largest = _examples(job, _EXAMPLES), 0.0
        sizes = (1, len(tensors_in(batch)[0]))
        with job.evaluating(), torch.no_grad(), replacing(out / to.file) as file:
            exported = export_program(job.task, job.model, copied(batch))
            to.write(exported, file)
            file.flush()
            loaded = to.load(Path(file.name))

            # Compare with one of the first validation examples, and with all of them.
            for size in sizes:
                part = take(batch, torch.arange(size))
                inputs = exported.inputs(copied(part))
                args, kwargs = first_call(job.task, job.model, part)
                outputs = tensors_in(job.model(*args, **kwargs))
                apart = compared(loaded(inputs), outputs, f"{request.run}: on {size}")
                largest = max(largest, apart)
            equal = (
                f"the loaded file equals the model on {sizes[1]} validation examples and on 1: "
                f"largest difference {largest:.3g} (tolerance {TOLERANCE:g} of the largest output)"
            )

            # Describe the file. If this fails, the earlier file and its card stay.
            with Path(file.name).open("rb") as written:
                digest = hashlib.file_digest(written, "sha256").hexdigest()
            licence = request.licence or _NO_LICENCE
            about = {"file_sha256": digest, "file_check": equal, "licence": licence}
            source = job.task.input_source()
            text = card_text(model, about, to.lines(inputs), inputs, outputs, source)
            with replacing(out / CARD) as card:
                card.write(text.encode())
            if source:
                with replacing(out / INPUTS) as code:
                    code.write(source.encode())
            else:  # of another model that was written here before
                (out / INPUTS).unlink(missing_ok=True)
        shapes = [", ".join(map(described, part)) for part in (inputs.values(), outputs)]
        run.report(" -> ".join(shapes))
        run.report(equal)
        files = [out / name for name in (to.file, CARD, *([INPUTS] if source else []))]
        run.report(f"written to {', '.join(map(str, files[:-1]))} and {files[-1]}")


def _examples(job: Inference, most: int) -> Any:
    """Return a batch of 2 to `most` examples of the validation data."""
    batch = job.evaluation.read([0])[0]
    count = len(tensors_in(batch)[0])
    # torch would take a dimension of size 1 as fixed.
    return take(batch, torch.arange(min(max(count, 2), most)) % count)


def compared(found: Sequence[Tensor], wanted: Sequence[Tensor], what: str) -> float:
    """Return the largest difference between the outputs of the file and of the model.

    Raises:
        Failure: It is above the tolerance.
    """
    differences = [(float("inf"), 0.0)]
    if len(found) == len(wanted):
        differences = [difference(one, other) for one, other in zip(found, wanted, strict=True)]
    for apart, allowed in differences:
        if apart > allowed:
            raise Failure(
                f"DIFFERENT OUTPUTS: {what} validation example(s), the outputs of the exported "
                f"file differ from the model's outputs by up to {apart:.3g}, and {allowed:.3g} is "
                "allowed; no file was written. A model or a prepare() that draws random numbers in "
                "a validation cannot be exported",
                exit_code=ExitCode.DIFFERENT,
            )
    return max(apart for apart, _ in differences)


def difference(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return the largest difference of two tensors, and the largest that is allowed.

    NaN equals NaN, and an infinity equals itself. Integers must be equal.
    """
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf"), 0.0
    one, other = found.to(torch.complex128), wanted.to(torch.complex128)
    equal = torch.isclose(one, other, rtol=0, atol=0, equal_nan=True)
    apart = (one - other).abs().nan_to_num(nan=float("inf"), posinf=float("inf"))
    largest = max(apart[~equal].tolist(), default=0.0)
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return largest, 0.0
    scale = max(other.abs()[other.isfinite()].tolist(), default=0.0)
    return largest, max(TOLERANCE * scale, ROUNDING)


def card_text(
    model: StoredModel,
    about: Mapping[str, str],
    lines: str,
    inputs: Mapping[str, Tensor],
    outputs: Sequence[Tensor],
    source: str,
) -> str:
    """Return the card of an exported model as Markdown.

    `about` has rows about the file, and `lines` are the lines of Python that load it. The model
    has these `outputs` for the `inputs`, which are examples of the validation data. `source` is the
    task's code that reads an input.
    """
    record, task = model.run.record, model.job.task
    changed = listed_changes(model.changed)
    origin = {**model.origin, "run": record.path.name, "changed": changed}
    interface = [f"- `{name}`: {described(x)}" for name, x in inputs.items()]
    interface += [f"- output: {described(tensor)}" for tensor in outputs]
    if isinstance(task, Classification) and task.class_names:
        classes = ", ".join(f"{k}: {escaped_line(name)}" for k, name in enumerate(task.class_names))
        interface += [f"- the columns of the output are logits of the classes: {classes}"]
    parts = [
        f"# {escaped_line(record.path.name)}",
        "## Load the model",
        f"In the folder of the file:\n\n```python\n{lines}\n```",
        "## Inputs and outputs",
        "\n".join(interface),
        "The inputs are examples as the dataset of the task returns them. The file contains "
        "`prepare` of the task, such as a normalisation. `batch` is any number from 1.",
        f"`load(path)` in `{INPUTS}` reads a file as an input. "
        f"{ast.get_docstring(ast.parse(source)) or ''}"
        if source
        else "",
        "## Origin",
        _table(origin | {**about} | _origin_of(record.manifest)),
        f"## Metrics of the validation at step {origin['step']}",
        _table(_metrics(model)) or "The training has no validation at this step.",
        *_metrics_of_test(model),
        "## Settings",
        _table(_settings_of(record.values)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _metrics(model: StoredModel) -> Mapping[str, Any]:
    """Return the metrics of the validation at the step of the weights, or none.

    The checkpoint has the metrics of the best step. Its digest is verified; metrics.jsonl has no
    digest.
    """
    if model.progress["best_step"] == model.origin["step"]:
        return dict(model.progress["best_metrics"])
    figures = model.run.record.figures_at(model.origin["step"]) or {}
    return {name: value for name, value in figures.items() if not isinstance(value, list)}


def _metrics_of_test(model: StoredModel) -> list[str]:
    """Return the section with the metrics of `trainbox evaluate RUN --data test`, or nothing.

    These metrics must belong to the same weights.
    """
    for path in sorted(model.run.record.path.glob("evaluations/*/evaluation.json")):
        found = object_if_valid(path) or {}
        figures, intervals = found.get("figures"), found.get("intervals") or {}
        if (
            found.get("data") != "test"
            or found.get("weights_sha256") != model.origin["weights_sha256"]
            or not isinstance(figures, dict)
        ):
            continue
        rows = {
            name: f"{value:.6g}"
            + (" ({:.4g} to {:.4g})".format(*intervals[name]) if name in intervals else "")
            for name, value in figures.items()
            if isinstance(value, int | float)
        }
        title = f"## Metrics of the test on {found.get('examples')} examples"
        title += f", with {LEVEL:.0%} intervals" if intervals else ""
        return [title, _table(rows)]
    return []


def _origin_of(manifest: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a manifest for the card, without secrets."""
    rows = {}
    for name, value in flat(manifest).items():
        if _ORIGIN.fullmatch(name) and value is not None and not isinstance(value, bool):
            text = ", ".join(map(str, value)) if isinstance(value, list) else str(value)
            rows[name] = text if _DIGEST.fullmatch(text) else without_secrets(text)
    sources = manifest["sources"]
    listing = "".join(f"{name} {sources[name]}\n" for name in sorted(sources))
    return rows | {"sources_sha256": hashlib.sha256(listing.encode()).hexdigest()}


def _settings_of(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a task for the card, without secrets; its fields as `task.NAME`."""
    settings = {name: value for name, value in config.items() if value is not None}
    fields = {f"task.{name}": value for name, value in settings.pop("fields").items()}
    return {
        name: value if isinstance(value, int | float) else shown_value(name, str(value))
        for name, value in (settings | fields).items()
    }


def described(tensor: Tensor) -> str:
    """Return the type and the shape of a batch, such as `float32 (batch, 10)`."""
    shape = ", ".join(["batch", *map(str, tensor.shape[1:])]) if tensor.ndim else ""
    return f"{dtype_name(tensor)} ({shape})"


def _table(rows: Mapping[str, Any]) -> str:
    """Return a table of Markdown with the values that are not empty, or nothing without rows."""
    lines = [f"| {cell(name)} | {cell(value)} |" for name, value in rows.items() if value != ""]
    return "\n".join(["| Name | Value |", "|---|---|", *lines]) if lines else ""
