"""The verb `evaluate`."""

from pathlib import Path
from typing import Any

import click

from entrypoint.cli.checking import checked_plan
from entrypoint.cli.launching import supervised
from entrypoint.cli.options import stored_run_options
from entrypoint.launch.supervise import EVALUATION
from entrypoint.script.folder import refuse_script


@click.command()
@stored_run_options
@click.option(
    "--data",
    type=click.Choice(["validation", "test"]),
    default="validation",
    help="The validation data (default), or the task's test_dataset.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder of the results. Default: evaluations/CHECKPOINT-DATA in RUN.",
)
@click.option(
    "--predictions",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the prediction for each example as CSV.",
)
@click.option(
    "--intervals/--no-intervals",
    default=True,
    help="Bootstrap 95 % intervals of the metrics (default).",
)
@click.argument("run", type=click.Path(path_type=Path))
def evaluate(
    run: Path,
    checkpoint: str,
    data: str,
    data_dir: Path,
    out: Path | None,
    predictions: Path | None,
    intervals: bool,
    anyway: bool,
    **options: Any,
) -> None:
    """Evaluate a checkpoint of RUN, also while RUN trains.

    The figures are compared with those that the training recorded. If they differ and nothing has
    changed since, the exit code is 8.

    \b
    Examples:
      trainbox evaluate runs/digits-7d2c1a90
      trainbox evaluate runs/digits-7d2c1a90 --checkpoint last --predictions out.csv
      trainbox evaluate runs/digits-7d2c1a90 --data test --out results
      trainbox evaluate runs/digits-7d2c1a90 --data-dir other-data --gpus 2
    """
    refuse_script(run, "evaluate")
    arguments = [str(run), "--data-dir", str(data_dir), "--checkpoint", checkpoint, "--data", data]
    arguments += [] if out is None else ["--out", str(out)]
    arguments += [] if predictions is None else ["--predictions", str(predictions)]
    arguments += [] if intervals else ["--no-intervals"]
    arguments += ["--anyway"] if anyway else []
    supervised(*checked_plan(tuple(arguments), options, verb="evaluate"), kind=EVALUATION)
