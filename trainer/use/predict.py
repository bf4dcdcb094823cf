"""Run one call of `predict`: predict files with the weights of a stored run.

The run's folder is only read, so the run may still train. Standard output gets the rows and nothing
else.
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from tqdm import tqdm

from trainbox.contract.errors import Preempted, StorageFailure, WrongUse
from trainbox.contract.streams import message_line
from trainbox.contract.temporary import sockets_in_a_folder
from trainbox.task import Task
from trainer.loop.build import build_prediction
from trainer.loop.evaluate import add_up
from trainer.loop.state import Inference
from trainer.parallel.strategy import Strategy
from trainer.run.compare import listed_changes
from trainer.run.run_record import RunRecord
from trainer.session.agreement import refuse_difference
from trainer.session.failures import errors_as_failures
from trainer.system.given_files import given_files
from trainer.system.signals import StopRequest
from trainer.use.per_example import example_ids, not_too_many, predictions_of
from trainer.use.predictions import Columns, csv_rows, json_lines, prediction_columns
from trainer.use.stored_model import join_and_load_task, load_compared

_FORMS = {"csv": csv_rows, "jsonl": json_lines}
_SHOWN = 3  # of the files that are left out


@dataclass(frozen=True)
class PredictRequest:
    """What to predict, and how to write it.

    Attributes:
        given: Files, and folders of files.
        checkpoint: `best` or `last`.
        form: `csv` or `jsonl`.
        anyway: Whether changed source files of the task are accepted.
    """

    given: Sequence[Path]
    checkpoint: str
    form: str
    anyway: bool = False


@sockets_in_a_folder()
def predict_run(
    path: Path, request: PredictRequest, stop: StopRequest, device_name: str, data_dir: Path
) -> None:
    """Predict files with a checkpoint of the run in `path`, and write the rows.

    Raises:
        WrongUse: The run cannot predict, or a file cannot be used.
        StorageFailure: Standard output cannot be written.
    """
    stored = RunRecord.open(path)
    # A task may print.
    with errors_as_failures(path), contextlib.redirect_stdout(sys.stderr):
        settings, strategy, task = join_and_load_task(stored, request, device_name)
        files = _files(task, request.given, strategy)
        job = build_prediction(settings, task, strategy, data_dir, files)
        columns = _predict(job, stored, request, stop)
    # The reader of standard output may be slow, such as a pager.
    with errors_as_failures(path), strategy.world.wait_for_all("the output"):
        if strategy.world.is_first:
            _write(_FORMS[request.form](columns))
    strategy.world.leave()


def _files(task: Task, given: Sequence[Path], strategy: Strategy) -> list[Path]:
    """Return the files to predict.

    Raises:
        WrongUse: The task cannot read files, a folder has none, or another machine has others.
    """
    if (
        type(task).load_example is Task.load_example
        and type(task).prediction_dataset is Task.prediction_dataset
    ):
        raise WrongUse(
            f"task {type(task).__name__} has no method load_example(): define it to return the "
            "example of a file"
        )
    files = given_files(given, task.example_endings)
    refuse_difference(strategy.world, {"files": files}, "copy the same files to all machines")
    return files


def _predict(
    job: Inference, stored: RunRecord, request: PredictRequest, stop: StopRequest
) -> Columns:
    """Load the weights and predict; all ranks must call this. Rank 0 gets the columns."""
    world = job.world
    report = partial(_report, job)
    loaded = load_compared(
        job, stored, request.checkpoint, "prediction", request.anyway, "predict", report
    )
    if loaded.changed:
        report(f"changed since the run's start: {listed_changes(loaded.changed)}")
    skipped = list(getattr(job.evaluation.dataset, "skipped", ()))
    if skipped:
        shown = ", ".join(map(str, skipped[:_SHOWN])) + (", ..." if skipped[_SHOWN:] else "")
        report(f"{len(skipped)} file(s) are left out: {shown}")

    # The seed is that of the validation after this step.
    ids, predicted = example_ids(job), predictions_of(job)
    seed_parts = (job.config.seed, "validation", loaded.weights.step)
    hidden = None if world.is_first else True  # None shows the bar on a terminal
    ended = add_up(
        job,
        job.evaluation,
        world,
        seed_parts,
        lambda: bool(world.vote(bool(stop))[0]),
        [predicted],
        lambda batches, count: tqdm(
            batches, "predicting", count, unit=" batches", leave=False, disable=hidden
        ),
        statistics=False,
    )
    if ended is None:
        world.leave()
        raise Preempted(
            f"stopped by {stop.cause} before the end of the prediction: start the same "
            "command again"
        )
    values = not_too_many(job.task, predicted.gathered())
    values.pop("truth", None)  # the label of a file is not known
    report(f"{len(ids):,} predictions")
    return prediction_columns(job.task, "file", ids, values)


def _report(job: Inference, line: str) -> None:
    if job.world.is_first:
        print(message_line(line), file=sys.stderr)


def _write(text: str) -> None:
    """Write all rows to standard output.

    Raises:
        StorageFailure: They cannot be written, for example because the disk is full.
    """
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        raise  # the reader needs no more rows
    except OSError as error:
        raise StorageFailure(
            f"standard output cannot be written ({error.strerror or error}): write it to another "
            "disk"
        ) from error
