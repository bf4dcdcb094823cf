"""Run one call of `evaluate`: compute the figures of a stored checkpoint again, or on other data.

The run's folder is only read, so the run may still train. The results go to a folder of their own.
"""

import json
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainbox.disclosure.recorded_values import listed_changes
from trainbox.errors import ExitCode, Failure, WrongUse
from trainbox.files.entries import plain
from trainbox.files.regular_files import replacing
from trainbox.folders.record_folder import METRICS
from trainbox.folders.write_failures import writing
from trainbox.order import derive_seed
from trainbox.pictures import write_png
from trainer.loop.build import build_inference
from trainer.loop.evaluate import evaluate
from trainer.loop.task_checks import check_defines
from trainer.loop.validate import draw
from trainer.records.compare_runs import changes_bits, first_figure_difference
from trainer.records.jsonl import damaged_line
from trainer.system.signals import StopRequest
from trainer.use.per_example import (
    LEVEL,
    RESAMPLES,
    Predictions,
    bootstrap_intervals,
    csv_rows,
    prediction_columns,
    statistics_of,
)
from trainer.use.stored_model import (
    ANOTHER_FOLDER,
    VALIDATION,
    Request,
    StoredModel,
    opened,
    stopping,
)

_ANOTHER_FILE = "set another file with --predictions FILE"


@dataclass(frozen=True, kw_only=True)
class EvaluateRequest(Request):
    """What to evaluate, and where the results go.

    Attributes:
        data: `validation` or `test`.
        out: The folder of the results, or None for a folder in the run's folder.
        predictions: The CSV file to write, or None.
        intervals: Whether to compute bootstrap intervals.
    """

    data: str
    out: Path | None
    predictions: Path | None
    intervals: bool


def evaluate_run(request: EvaluateRequest, stop: StopRequest) -> None:
    """Evaluate a checkpoint of a run, print the results and write them.

    If the run has a validation of the same step and data, the figures are compared with it.

    Raises:
        Failure: The figures differ from the training's figures, and nothing explains it.
        WrongUse: The run cannot be evaluated.
    """
    out = request.out or request.run / "evaluations" / f"{request.checkpoint}-{request.data}"
    with opened(request, out, "rank-{rank}.log") as run:
        is_test = request.data != VALIDATION
        if is_test:
            check_defines(run.task, "test_dataset", f", or use --data {VALIDATION}")
        if request.predictions is not None and run.strategy.world.is_first:
            _refuse_path(request.predictions)
        job = build_inference(run.settings, run.task, run.strategy, request.data_dir, is_test)
        model = run.load(job, request.data)
        problem = _evaluate(model, request, out, stop)
    if problem:
        raise Failure(f"DIFFERENT FIGURES: {request.run}: {problem}", exit_code=ExitCode.DIFFERENT)


def _refuse_path(path: Path) -> None:
    """Make the folder of the file `path`. So a wrong path is found before the evaluation.

    Raises:
        WrongUse: The file could be one of a run.
        StorageFailure: The file cannot be written.
    """
    of_a_run = any(
        (folder / "config.json").is_file() and (folder / "manifest.json").is_file()
        for folder in path.resolve().parents
    )
    if of_a_run and path.suffix != ".csv":
        raise WrongUse(
            f"--predictions {path} is in the folder of a run, whose files it could replace: choose "
            "a name that ends with .csv, or another folder"
        )
    with writing(path, _ANOTHER_FILE):
        path.parent.mkdir(parents=True, exist_ok=True)
        # The new file would replace a device.
        if path.exists() and not path.is_file():
            raise OSError("not a regular file")
        tempfile.NamedTemporaryFile("wb", prefix=path.name, dir=path.parent).close()


def _evaluate(model: StoredModel, request: EvaluateRequest, out: Path, stop: StopRequest) -> str:
    """Evaluate, report and write; all ranks must call this.

    Return an unexplained difference to the training, or an empty text.
    """
    job, world = model.job, model.job.world

    # Evaluate each example once, with the same seed as the training's validation after this step.
    predictions = Predictions(job) if request.predictions is not None else None
    statistics = statistics_of(job) if request.intervals else None
    observers = [each for each in (predictions, statistics) if each is not None]
    stopped = stopping(world, stop, "evaluation")
    result = evaluate(job, model.seed_parts, stopped, observers, model.run.bar)
    assert result is not None
    figures = plain(result.figures)
    equal, comparison, reason = _comparison(model, figures, request.data)
    damage = damaged_line(model.run.record.path / METRICS)
    comparison += f"; {damage}" if damage and request.data == VALIDATION else ""
    problem = comparison if equal is False and not reason else ""

    # Gather what all ranks have computed.
    predicted = predictions.gathered() if predictions is not None else {}
    sampled = statistics.gathered() if statistics is not None else {}

    # Draw the task's pictures, and write and print the results.
    drawing = draw(job, result, model.seed_parts) if job.strategy.forward_is_collective else None
    with world.wait_for_all("the results"):
        if not world.is_first:
            return problem
        drawing = drawing or draw(job, result, model.seed_parts)
        seed = derive_seed(job.config.seed, "bootstrap")
        intervals = bootstrap_intervals(job.task, sampled, seed)
        entry = {
            **model.origin,
            "data": request.data,
            "data_sha256": model.data_digest,
            "examples": job.evaluation.size,
            "batch_size": job.evaluation.batch_size,
            "precision": job.config.precision,
            "device": world.device.type,
            "strategy": job.strategy.name,
            "world_size": world.world_size,
            "figures": figures,
            "intervals": intervals,
            "resamples": RESAMPLES if intervals else 0,
            "training": {"equal": equal, "comparison": comparison},
            "changed": model.changed,
        }
        write_results(out, entry, drawing())
        written = f"{out}"
        if predictions is not None and (path := request.predictions) is not None:
            rows = csv_rows(prediction_columns(job.task, "id", predictions.ids, predicted))
            with writing(path, _ANOTHER_FILE), replacing(path) as file:
                # An id may be the path of a file, which may have any bytes.
                file.write(rows.encode(errors="backslashreplace"))
            written += f" and {path}"

        # Print the metrics with their intervals.
        title = f"{request.data}: {job.evaluation.size:,} examples"
        if intervals:
            title += f", with {LEVEL:.0%} intervals from {RESAMPLES:,} resamples of them"
        ends = {name: "  [{:.4g}, {:.4g}]".format(*pair) for name, pair in intervals.items()}
        width = max(map(len, result.metrics), default=0)
        lines = [
            f"{name:{width}}  {x:.6g}{ends.get(name, '')}" for name, x in result.metrics.items()
        ]
        if request.intervals and not intervals:
            lines.append("no intervals: the statistics of each example cannot be collected")
        model.run.report("\n  ".join([title, *lines, comparison, f"written to {written}"]))
    return problem


def write_results(out: Path, entry: Mapping[str, Any], pictures: Mapping[str, Any]) -> None:
    """Write the pictures and then evaluation.json, which replaces an earlier call's file."""
    with writing(out, ANOTHER_FOLDER):
        for name, picture in pictures.items():
            write_png(out / f"{name.replace('/', '-')}.png", picture)
        with replacing(out / "evaluation.json") as file:
            file.write(json.dumps(entry, indent=2).encode() + b"\n")


def _comparison(
    model: StoredModel, figures: Mapping[str, Any], part: str
) -> tuple[bool | None, str, str]:
    """Compare `figures` of the data `part` with the training's record of the step.

    Return whether they are equal, or None if they are not compared; a line; and what may have
    changed them, or an empty text.
    """
    record, step = model.run.record, model.origin["step"]
    if part != VALIDATION:
        return None, f"not compared: the training did not read the {part} data", ""
    if f"data.{VALIDATION}" in model.changed:
        return None, "not compared: the validation data differ from the training's", ""
    if (before := record.figures_at(step)) is None:
        return None, f"not compared: metrics.jsonl has no validation at step {step}", ""
    if (difference := first_figure_difference(before, figures)) is None:
        return True, f"equal to the training's validation at step {step}", ""
    changed = {
        name: values
        for name, values in model.changed.items()
        if changes_bits(name) or name.startswith("plan.")
    }
    reason = f"; changed: {listed_changes(changed)}" if changed else ""
    if not record.config.deterministic:
        reason = "; the run has --fast"
    line = f"different from the training's validation at step {step}: {difference}{reason}"
    return False, line, reason
