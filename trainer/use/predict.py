"""Run one call of `predict`: predict files with the weights of a stored run.

The run's folder is only read, so the run may still train. Standard output gets the rows and nothing
else.
"""

import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainbox.classification import Classification
from trainbox.errors import WrongUse
from trainbox.folders.write_failures import show
from trainbox.found_files import files_in
from trainbox.task import Task
from trainer.loop.build import build_prediction
from trainer.loop.evaluate import add_up
from trainer.loop.task_checks import check_defines, checked
from trainer.session.same_on_all_ranks import refuse_difference
from trainer.system.signals import StopRequest
from trainer.use.per_example import Predictions, csv_rows, json_lines, prediction_columns
from trainer.use.stored_model import Request, opened, stopping

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


def predict_run(request: PredictRequest, stop: StopRequest) -> None:
    """Predict files with a checkpoint of a run, and write the rows to standard output.

    Raises:
        WrongUse: The run cannot predict, a file cannot be used, or another machine has others.
        StorageFailure: Standard output cannot be written.
    """
    output = sys.stdout
    # A task may print.
    with contextlib.redirect_stdout(sys.stderr), opened(request) as run:
        # Build the examples and the model, and load the weights.
        task, world = run.task, run.strategy.world
        if type(task).prediction_dataset is Task.prediction_dataset:
            remedy = " to return the example of a file, and add --anyway, as this changes the task"
            check_defines(task, "load_example", remedy)
        if isinstance(task, Classification):
            names = tuple(run.record.manifest["classes"] or ())
            task = checked(task, "with_classes", task.with_classes(names))
        files = given_files(request.files, task.example_endings)
        refuse_difference(world, {"files": files}, "copy the same files to all machines")
        job = build_prediction(run.settings, task, run.strategy, request.data_dir, files)
        model = run.load(job, "prediction")
        if skipped := getattr(job.evaluation.dataset, "skipped", ()):
            shown = [*map(str, skipped[:_SHOWN]), *(["..."] if skipped[_SHOWN:] else [])]
            run.report(f"{len(skipped)} file(s) are left out: {', '.join(shown)}")

        # Predict each example once.
        predictions = Predictions(job)
        add_up(
            job,
            job.evaluation,
            world,
            model.seed_parts,
            stopping(world, stop, "prediction"),
            [predictions],
            run.bar,
            statistics=False,
        )
        values = predictions.gathered()
        values.pop("truth", None)  # the label of a file is not known
        count = len(predictions.ids)
        run.report(f"{count:,} prediction{'s' if count != 1 else ''}")

        # The reader of standard output may be slow, such as a pager.
        with world.wait_for_all("the output"):
            if world.is_first:
                columns = prediction_columns(job.task, "file", predictions.ids, values)
                rows = _FORMS[request.form](columns)
                show(rows, "", output)


def given_files(given: Sequence[Path], endings: tuple[str, ...]) -> list[Path]:
    """Return the files in `given`, and files in its folders with one of the `endings`.

    The files of a folder and of its folders are sorted by name. Links are followed, but not to a
    folder that contains the link. Names that start with a dot are left out. Without `endings`, all
    files are found.

    Raises:
        WrongUse: A path cannot be read, or a folder has no such file, or has a FIFO of that name.
    """
    found: list[Path] = []
    for path in given:
        if not path.is_dir():
            found.append(path)
            continue
        try:
            inside = list(files_in(path, endings or ("",)))
        except OSError as error:
            raise WrongUse(
                f"{error.filename} cannot be read ({error.strerror}): make it readable, or leave "
                "it out"
            ) from error
        if not inside:
            of_the_task = f" ({', '.join(endings)})" if endings else ""
            raise WrongUse(f"{path} has no file for this task{of_the_task}: name another folder")
        found += inside
    return found
