"""Run one call of `evaluate`: compute the figures of a stored checkpoint again, or on other data.

The run's folder is only read, so the run may still train. The results go to a folder of their own.
"""

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from trainbox.contract.errors import ExitCode, Failure, Preempted, WrongUse
from trainbox.contract.seeding import derive_seed
from trainbox.contract.temporary import sockets_in_a_folder
from trainbox.task import Task
from trainer.loop.build import build_inference
from trainer.loop.evaluate import Evaluation, evaluate
from trainer.loop.state import Inference
from trainer.loop.task_checks import checked_metrics
from trainer.loop.validate import draw
from trainer.parallel.world import World
from trainer.run.compare import listed_changes
from trainer.run.console import Console
from trainer.run.run_record import RunRecord
from trainer.session.failures import errors_as_failures
from trainer.system.signals import StopRequest
from trainer.use.bootstrap import LEVEL, RESAMPLES, bootstrap_intervals
from trainer.use.evaluation_files import (
    check_predictions,
    make_folder,
    save_predictions,
    write_results,
)
from trainer.use.per_example import predictions_of, statistics_of
from trainer.use.recorded_figures import (
    TEST,
    VALIDATION,
    FigureComparison,
    compare_figures,
    recorded_figures,
)
from trainer.use.stored_model import LoadedWeights, join_and_load_task, load_compared


@dataclass(frozen=True)
class EvaluateRequest:
    """What to evaluate, and where the results go.

    Attributes:
        checkpoint: `best` or `last`.
        data: `validation` or `test`.
        out: The folder of the results, or None for a folder in the run's folder.
        predictions: The CSV file to write, or None.
        intervals: Whether to compute bootstrap intervals.
        anyway: Whether changed source files of the task are accepted.
    """

    checkpoint: str
    data: str
    out: Path | None = None
    predictions: Path | None = None
    intervals: bool = True
    anyway: bool = False


@sockets_in_a_folder()
def evaluate_run(
    path: Path, request: EvaluateRequest, stop: StopRequest, device_name: str, data_dir: Path
) -> None:
    """Evaluate a checkpoint of the run in `path`, print the results and write them.

    If the run has a validation of the same step and data, the figures are compared with it.

    Raises:
        Failure: The figures differ from those of the training, and nothing explains it.
        WrongUse: The run cannot be evaluated.
    """
    stored = RunRecord.open(path)
    out = request.out or path / "evaluations" / f"{request.checkpoint}-{request.data}"
    with errors_as_failures(out):
        settings, strategy, task = join_and_load_task(stored, request, device_name)
        world = strategy.world
        is_test = request.data == TEST
        if is_test and type(task).test_dataset is Task.test_dataset:
            raise WrongUse(
                f"task {type(task).__name__} has no method test_dataset(): define it, or use "
                f"--data {VALIDATION}"
            )
        make_folder(out)
        log = out / f"rank-{world.rank}.log"
        with (
            contextlib.closing(Console(log, world.is_first)) as console,
            errors_as_failures(out, type(task).__name__, log),
        ):
            job = build_inference(settings, task, strategy, data_dir, is_test)
            if request.predictions is not None:
                check_predictions(request.predictions, job)
            comparison = _evaluate(job, stored, request, out, stop, console)
        world.leave()
        if comparison.unexplained:
            raise Failure(
                f"DIFFERENT FIGURES: {path}: {comparison.line}", exit_code=ExitCode.DIFFERENT
            )


def _evaluate(
    job: Inference,
    stored: RunRecord,
    request: EvaluateRequest,
    out: Path,
    stop: StopRequest,
    console: Console,
) -> FigureComparison:
    """Load the weights, evaluate, report and write; all ranks must call this."""
    # Load the weights, and compare the task, the data and the machine with those of the training.
    loaded = load_compared(
        job, stored, request.checkpoint, request.data, request.anyway, "evaluate", console.report
    )
    if loaded.changed:
        console.report(f"changed since the run's start: {listed_changes(loaded.changed)}")

    # Evaluate each example once. The seed is that of the training's validation after this step.
    predicted = predictions_of(job) if request.predictions is not None else None
    sampled = statistics_of(job) if request.intervals else None
    observers = [each for each in (predicted, sampled) if each is not None]
    seed_parts = (job.config.seed, "validation", loaded.weights.step)
    result = evaluate(
        job, seed_parts, lambda: _stopped(job.world, stop), observers, console.validation_bar
    )
    if result is None:
        job.world.leave()
        raise Preempted(
            f"stopped by {stop.cause} before the end of the evaluation: start the same "
            "command again"
        )
    figures = recorded_figures(result)
    comparison = compare_figures(stored, figures, loaded.weights.step, request.data, loaded.changed)

    # Gather what all ranks have computed.
    drawing = draw(job, result, seed_parts) if job.strategy.forward_is_collective else None
    values = predicted.gathered() if predicted is not None else None
    statistics = sampled.gathered() if sampled is not None else None

    # Draw the task's pictures, and write and print the results.
    with job.world.wait_for_all("the results"):
        if job.world.is_first:
            drawing = drawing or draw(job, result, seed_parts)
            intervals = _intervals(job, statistics)
            entry = {
                **_origin(job, stored, request, loaded),
                "figures": figures,
                "intervals": intervals,
                "resamples": RESAMPLES if intervals else 0,
                "training": {"equal": comparison.equal, "comparison": comparison.line},
                "changed": loaded.changed,
            }
            write_results(out, entry, drawing())
            if request.predictions is not None:
                save_predictions(request.predictions, job, values)
            _print(console, job, result, request.data, intervals)
            if request.intervals and not intervals:
                console.report("  no intervals: the statistics of each example cannot be collected")
            console.report(f"  {comparison.line}")
            also = f" and {request.predictions}" if request.predictions is not None else ""
            console.report(f"  written to {out}{also}")
    return comparison


def _origin(
    job: Inference, stored: RunRecord, request: EvaluateRequest, loaded: LoadedWeights
) -> dict[str, Any]:
    """Return what was evaluated and how, for evaluation.json."""
    return {
        "run": str(stored.path),
        "run_id": stored.run_id,
        "task": stored.config.task,
        "checkpoint": request.checkpoint,
        "step": loaded.weights.step,
        "weights_sha256": loaded.digest,
        "checkpoint_sha256": loaded.weights.sha256,
        "data": request.data,
        "data_sha256": loaded.data_digest,
        "examples": job.evaluation.size,
        "batch_size": job.evaluation.batch_size,
        "precision": job.config.precision,
        "device": job.world.device.type,
        "strategy": job.strategy.name,
        "world_size": job.world.world_size,
    }


def _stopped(world: World, stop: StopRequest) -> bool:
    return bool(world.vote(bool(stop))[0])


def _intervals(
    job: Inference, statistics: Mapping[str, Tensor] | None
) -> dict[str, tuple[float, float]]:
    """Return the bootstrap interval of each metric, or none without statistics of each example."""
    if statistics is None:
        return {}
    seed = derive_seed(job.config.seed, "bootstrap")
    return bootstrap_intervals(
        statistics, lambda totals: checked_metrics(job.task, job.task.metrics(totals)), seed
    )


def _print(
    console: Console,
    job: Inference,
    result: Evaluation,
    part: str,
    intervals: Mapping[str, tuple[float, float]],
) -> None:
    resampled = (
        f", with {LEVEL:.0%} intervals from {RESAMPLES:,} resamples of them" if intervals else ""
    )
    console.report(f"{part}: {job.evaluation.size:,} examples{resampled}")
    width = max(map(len, result.metrics), default=0)
    for name, value in result.metrics.items():
        ends = "  [{:.4g}, {:.4g}]".format(*intervals[name]) if name in intervals else ""
        console.report(f"  {name:{width}}  {value:.6g}{ends}")
