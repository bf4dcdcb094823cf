"""The command `predict`: check the arguments without torch, then predict files."""

from pathlib import Path

import click

from trainer.cli.invocation import Verb, check_run, read_device, report_environment
from trainer.cli.options import verification_options
from trainer.system.given_files import check_files
from trainer.system.signals import StopRequest


@click.command(cls=Verb)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("files", type=click.Path(path_type=Path), nargs=-1, required=True)
@click.option("--checkpoint", type=click.Choice(["best", "last"]), default="best")
@click.option("--format", "form", type=click.Choice(["csv", "jsonl"]), default="csv")
@click.option("--anyway", is_flag=True)
@verification_options
def predict(
    run: Path,
    files: tuple[Path, ...],
    checkpoint: str,
    form: str,
    anyway: bool,
    data_dir: Path,
    device: str,
    only_check: bool,
    device_on_stdin: bool,
) -> None:
    """Predict FILES with a checkpoint of RUN, and write a row for each to standard output."""
    device = read_device(device, device_on_stdin)
    check_run("predict", run)
    check_files(files)
    if only_check:
        report_environment()
        return
    stop = StopRequest.install()
    from trainer.session.predict import PredictRequest, predict_run

    predict_run(run, PredictRequest(files, checkpoint, form, anyway), stop, device, data_dir)
