"""Run one call of `predict`: predict files with the weights of a stored run.

The run's folder is only read, so the run may still train. Standard output gets the rows and nothing
else.
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from trainbox.contract.streams import message_line
from trainbox.contract.temporary import sockets_in_a_folder
from trainbox.task import Task
from trainer.loop.build import build_prediction
from trainer.loop.evaluate import add_up
from trainer.loop.task_checks import check_defines
from trainer.parallel.world import World
from trainer.session.agreement import refuse_difference
from trainer.session.failures import errors_as_failures
from trainer.system.given_files import given_files
from trainer.system.signals import StopRequest
from trainer.use.predictions import Columns, Predictions, csv_rows, json_lines, prediction_columns
from trainer.use.stored_model import Request, StoredModel, StoredTask, open_task, writing

_FORMS = {"csv": csv_rows, "jsonl": json_lines}
_SHOWN = 3  # of the files that are left out


@dataclass(frozen=True, kw_only=True)
class PredictRequest(Request):
    """What to predict, and how to write it.

    Attributes:
        files: Files, and folders of files.
        form: `csv` or `jsonl`.
    """

    files: Sequence[Path]
    form: str


@sockets_in_a_folder()
def predict_run(request: PredictRequest, stop: StopRequest) -> None:
    """Predict files with a checkpoint of a run, and write the rows to standard output.

    Raises:
        WrongUse: The run cannot predict, or a file cannot be used.
        StorageFailure: Standard output cannot be written.
    """
    with errors_as_failures(request.run):
        with contextlib.redirect_stdout(sys.stderr):  # a task may print
            stored = open_task(request)
            columns = _predict(stored, request, stop)
        # The reader of standard output may be slow, such as a pager.
        world = stored.strategy.world
        with world.wait_for_all("the output"):
            if world.is_first:
                _write(_FORMS[request.form](columns))
        world.leave()


def _files(task: Task, given: Sequence[Path], world: World) -> list[Path]:
    """Return the files to predict.

    Raises:
        WrongUse: The task cannot read files, a folder has none, or another machine has others.
    """
    if type(task).prediction_dataset is Task.prediction_dataset:
        check_defines(task, "load_example", " to return the example of a file")
    files = given_files(given, task.example_endings)
    refuse_difference(world, {"files": files}, "copy the same files to all machines")
    return files


def _predict(stored: StoredTask, request: PredictRequest, stop: StopRequest) -> Columns:
    """Load the weights and predict; all ranks must call this."""
    record, settings, strategy, task = stored
    world = strategy.world

    def report(line: str) -> None:
        if world.is_first:
            print(message_line(line), file=sys.stderr)

    # Build the examples and the model, and load the weights.
    files = _files(task, request.files, world)
    job = build_prediction(settings, task, strategy, request.data_dir, files)
    model = StoredModel.load(record, job, request, "prediction", report)
    skipped = list(getattr(job.evaluation.dataset, "skipped", ()))
    if skipped:
        shown = ", ".join(map(str, skipped[:_SHOWN])) + (", ..." if skipped[_SHOWN:] else "")
        report(f"{len(skipped)} file(s) are left out: {shown}")

    # Predict each example once.
    predictions = Predictions(job)
    hidden = None if world.is_first else True  # None shows the bar on a terminal
    model.until_stopped(
        "prediction",
        stop,
        lambda stopped: add_up(
            job,
            job.evaluation,
            world,
            model.seed_parts,
            stopped,
            [predictions],
            lambda batches, count: tqdm(
                batches, "predicting", count, unit=" batches", leave=False, disable=hidden
            ),
            statistics=False,
        ),
    )
    values = predictions.gathered()
    values.pop("truth", None)  # the label of a file is not known
    report(f"{len(predictions.ids):,} predictions")
    return prediction_columns(job.task, "file", predictions.ids, values)


def _write(text: str) -> None:
    """Write all rows to standard output.

    Raises:
        StorageFailure: They cannot be written, for example because the disk is full.
    """
    with writing("standard output", "write it to another disk"):
        sys.stdout.write(text)
        sys.stdout.flush()
