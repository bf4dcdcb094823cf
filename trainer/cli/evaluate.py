"""The command `evaluate`: check the arguments without torch, then evaluate a stored run."""

from pathlib import Path

import click

from trainer.cli.invocation import Verb, check_run, read_device, report_environment
from trainer.cli.options import verification_options
from trainer.system.signals import StopRequest


@click.command(cls=Verb)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--checkpoint", type=click.Choice(["best", "last"]), default="best")
@click.option("--data", type=click.Choice(["validation", "test"]), default="validation")
@click.option("--out", type=click.Path(path_type=Path), metavar="FOLDER")
@click.option("--predictions", type=click.Path(path_type=Path), metavar="FILE")
@click.option("--intervals/--no-intervals", default=True)
@click.option("--anyway", is_flag=True)
@verification_options
def evaluate(
    run: Path,
    checkpoint: str,
    data: str,
    out: Path | None,
    predictions: Path | None,
    intervals: bool,
    anyway: bool,
    data_dir: Path,
    device: str,
    only_check: bool,
    device_on_stdin: bool,
) -> None:
    """Evaluate a checkpoint of RUN on its validation data or its test data."""
    device = read_device(device, device_on_stdin)
    check_run("evaluate", run)
    if only_check:
        report_environment()
        return
    stop = StopRequest.install()
    from trainer.session.evaluate import EvaluateRequest, evaluate_run

    request = EvaluateRequest(checkpoint, data, out, predictions, intervals, anyway)
    evaluate_run(run, request, stop, device, data_dir)
