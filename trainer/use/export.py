"""Run one call of `export`: write the model of a stored run as a file without Trainbox.

The model computes on the CPU in float32. The file gets its name only after it was loaded and gave
the outputs of the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainbox.contract.config import CONTIGUOUS
from trainbox.contract.errors import ExitCode, Failure
from trainbox.contract.files import replacing
from trainbox.contract.temporary import sockets_in_a_folder
from trainer.data.nested import take, tensors_in
from trainer.loop.build import build_inference
from trainer.loop.state import Inference
from trainer.parallel.buffers import evaluating
from trainer.run.console import Console
from trainer.session.failures import errors_as_failures
from trainer.use.export_formats import FORMATS, Loaded, check_packages
from trainer.use.export_program import Exported, export_program, find_call
from trainer.use.model_card import CARD, ExportedFile, card_text, described
from trainer.use.stored_model import VALIDATION, Request, StoredModel, open_task, results_in

# The largest difference, as a share of the largest output. Other kernels add in another order.
TOLERANCE = 1e-4
# Always allowed: the rounding of a sum of float32 values of about 1. Outputs near 0 may
# be the difference of such values.
ROUNDING = 1e-6
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


@sockets_in_a_folder()
def export_run(request: ExportRequest) -> None:
    """Export the model of a run, compare the file with the model, and write its card.

    Raises:
        Failure: The loaded file has other outputs than the model. No file is written.
        WrongUse: The run or its model cannot be exported.
    """
    out = request.out or request.run / "exports" / f"{request.checkpoint}-{request.to}"
    with errors_as_failures(out):
        check_packages(request.to)
        stored = open_task(request, precision="fp32", compile=False, memory_format=CONTIGUOUS)
        record, settings, strategy, task = stored
        with results_in(out, "export.log", stored) as console:
            job = build_inference(settings, task, strategy, request.data_dir, test=False)
            # The settings and the machine of the export are others on purpose.
            relevant = ("data.", "sources.")
            model = StoredModel.load(record, job, request, VALIDATION, console.report, relevant)
            _export(model, request, out, console)


def _export(model: StoredModel, request: ExportRequest, out: Path, console: Console) -> None:
    """Export the model, compare, and write the file and its card."""
    job, to = model.job, FORMATS[request.to]

    # Export with the first validation examples, and compare with one example as well.
    batch = _examples(job, _EXAMPLES)
    sizes = (len(tensors_in(batch)[0]), 1)
    with evaluating(job.model):
        exported = export_program(job.task, job.model, batch)
        batches = [take(batch, torch.arange(size)) for size in sizes]
        calls = [find_call(job.task, job.model, part) for part in batches]
        expected = [tensors_in(call.output) for call in calls]
        with replacing(out / to.file) as file:
            to.write(exported, file)
            file.flush()
            loaded = to.load(Path(file.name))
            largest = _compared(loaded, exported, batches, expected, request.run)

            # Describe the file. If this fails, the earlier file and its card stay.
            inputs, outputs = exported.inputs(batch), expected[0]
            described_file = ExportedFile(
                Path(file.name), to, exported.names, inputs, outputs, sizes, largest
            )
            text = card_text(model, described_file, request.checkpoint, request.licence)
            with replacing(out / CARD) as card:
                card.write(text.encode())

    console.report(f"{_listed(inputs)} -> {_listed(outputs)}")
    console.report(
        f"the loaded file equals the model on {sizes[0]} validation examples and on {sizes[1]}: "
        f"largest difference {largest:.3g} (tolerance {TOLERANCE:g} of the largest output)"
    )
    console.report(f"written to {out / to.file} and {out / CARD}")


def _listed(tensors: Sequence[Tensor]) -> str:
    return ", ".join(described(tensor) for tensor in tensors)


def _examples(job: Inference, most: int) -> Any:
    """Return a batch of 2 to `most` examples of the validation data."""
    batch = job.evaluation.read([0])[0]
    count = len(tensors_in(batch)[0])
    # torch would take a dimension of size 1 as fixed.
    return take(batch, torch.arange(min(max(count, 2), most)) % count)


def _compared(
    loaded: Loaded,
    exported: Exported,
    batches: Sequence[Any],
    expected: Sequence[Sequence[Tensor]],
    run: Path,
) -> float:
    """Return the largest difference between the outputs of the file and of the model.

    Raises:
        Failure: It is above the tolerance.
    """
    largest = 0.0
    for batch, wanted in zip(batches, expected, strict=True):
        found = loaded(exported.inputs(batch))
        pairs = zip(found, wanted, strict=True) if len(found) == len(wanted) else ()
        differences = [difference(one, other) for one, other in pairs] or [(float("inf"), 0.0)]
        for apart, allowed in differences:
            if apart > allowed:
                raise Failure(
                    f"DIFFERENT OUTPUTS: {run}: on {len(tensors_in(batch)[0])} validation "
                    f"example(s), the outputs of the exported file differ from those of the model "
                    f"by up to {apart:.3g}, and {allowed:.3g} is allowed; no file was written. A "
                    "model or a prepare() that draws random numbers in a validation cannot be "
                    "exported",
                    exit_code=ExitCode.DIFFERENT,
                )
            largest = max(largest, apart)
    return largest


def difference(found: Tensor, wanted: Tensor) -> tuple[float, float]:
    """Return the largest difference of two tensors, and the largest that is allowed.

    NaN equals NaN, and an infinity equals itself. Integers must be equal.
    """
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf"), 0.0
    one, other = found.to(torch.complex128), wanted.to(torch.complex128)
    apart = (one - other).abs()
    apart[torch.isclose(one, other, rtol=0, atol=0, equal_nan=True)] = 0
    apart = apart.nan_to_num(nan=float("inf"), posinf=float("inf"))
    if not apart.numel():
        return 0.0, 0.0
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return float(apart.max()), 0.0
    finite = other.abs()[other.abs().isfinite()]
    scale = float(finite.max()) if finite.numel() else 0.0
    return float(apart.max()), max(TOLERANCE * scale, ROUNDING)
