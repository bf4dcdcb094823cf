"""The command `export`: check the arguments without torch, then export the model of a run."""

import signal
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from trainbox.contract.errors import Preempted
from trainer.cli.invocation import Verb, check_run
from trainer.cli.options import data_option
from trainer.system.signals import STOP_SIGNALS, handle_stop_signals


@click.command(cls=Verb)
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--to",
    type=click.Choice(["pt2", "onnx"]),
    default="pt2",
    help="The format: pt2 of torch.export (default), or onnx.",
)
@click.option(
    "--checkpoint",
    type=click.Choice(["best", "last"]),
    default="best",
    help="The weights of the best validation (default), or of the newest checkpoint.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder of the files. Default: exports/CHECKPOINT-FORMAT in RUN.",
)
@click.option("--licence", metavar="NAME", help="The licence of the model, for its card.")
@click.option("--anyway", is_flag=True, help="Export even if the source files of the task changed.")
@data_option
def export(
    run: Path,
    to: str,
    checkpoint: str,
    out: Path | None,
    licence: str | None,
    anyway: bool,
    data_dir: Path,
) -> None:
    """Export the model of RUN as a file that needs no Trainbox, with a card.

    The file is loaded again, and its outputs are compared with those of the model on validation
    examples. If they differ, the exit code is 8 and no file is written.

    \b
    Examples:
      trainbox export runs/digits-7d2c1a90
      trainbox export runs/digits-7d2c1a90 --checkpoint last --out exported
      trainbox export runs/digits-7d2c1a90 --to onnx --licence CC-BY-4.0
    """
    check_run("export", run)
    handle_stop_signals(_stop)
    from trainer.session.export import ExportRequest, export_run

    try:
        export_run(run, ExportRequest(to, checkpoint, out, licence, anyway), data_dir)
    except _Stop as stop:
        raise Preempted(
            f"stopped by {stop} before the end of the export: start the same command again"
        ) from None


class _Stop(BaseException):
    """A stop signal. torch catches each Exception during an export."""


def _stop(number: int, _frame: FrameType | None) -> NoReturn:
    raise _Stop(STOP_SIGNALS[signal.Signals(number)])
