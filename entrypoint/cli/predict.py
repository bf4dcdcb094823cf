"""The verb `predict`."""

from pathlib import Path
from typing import Any

import click

from entrypoint.cli.checking import checked_plan
from entrypoint.cli.launching import supervised
from entrypoint.cli.options import stored_run_options
from entrypoint.launch.supervise import PREDICTION
from entrypoint.script.folder import refuse_script


@click.command()
@stored_run_options
@click.option(
    "--format",
    "form",
    type=click.Choice(["csv", "jsonl"]),
    default="csv",
    help="CSV with a header (default), or a JSON object on each line.",
)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
def predict(
    run: Path,
    files: tuple[Path, ...],
    checkpoint: str,
    form: str,
    data_dir: Path,
    anyway: bool,
    **options: Any,
) -> None:
    """Predict FILES with the weights of RUN, and write a row for each to standard output.

    FILES are files, or folders that are searched for the files of the task.

    \b
    Examples:
      trainbox predict runs/images-7d2c1a90 a.jpg b.jpg
      trainbox predict runs/images-7d2c1a90 new/ > predictions.csv
      trainbox predict runs/images-7d2c1a90 new/ --format jsonl --gpus 2
    """
    refuse_script(run, "predict")
    arguments = ["--data-dir", str(data_dir), "--checkpoint", checkpoint, "--format", form]
    arguments += ["--anyway"] if anyway else []
    arguments += ["--", str(run), *map(str, files)]
    supervised(*checked_plan(tuple(arguments), options, verb="predict"), kind=PREDICTION)
