"""Run `python -m trainer`: choose the command, and map its errors to exit codes."""

import sys
from pathlib import Path
from typing import NoReturn

import click

from trainer.cli.invocation import Verb
from trainer.cli.sweep import sweep, sweep_show
from trainer.cli.sweep_run import sweep_run
from trainer.cli.tasks import tasks
from trainer.cli.train import train, verify
from trainer.errors import Failure, WrongUse, called_exit
from trainer.system.report import report_failure
from trainer.system.streams import message

PAGE = {"help_option_names": ["--help", "-h"], "max_content_width": 110}


@click.group(context_settings=PAGE)
def cli() -> None:
    """Train a task on the devices of this process. `trainbox` plans and starts this command."""


@cli.command("bench-figure", cls=Verb)
@click.argument("folder", type=click.Path(path_type=Path))
def bench_figure(folder: Path) -> None:
    """Draw bench.svg from the bench.json in FOLDER, as `trainbox bench --out FOLDER` does."""
    from trainer.cli.bench_figure import draw

    draw(folder)


for command in (train, verify, sweep, sweep_run, sweep_show, tasks):
    cli.add_command(command)


def main() -> NoReturn:
    """Run the command of this process's arguments, and exit."""
    sys.exit(_run())


def _run() -> int:
    """Run the command, report its error, and return the exit code."""
    try:
        return int(cli.main(prog_name="trainbox", standalone_mode=False) or 0)
    except click.ClickException as error:
        click.echo(message(error.format_message()), err=True)
        return WrongUse.exit_code
    except Failure as error:
        report_failure(error)
        return error.exit_code
    except SystemExit as end:
        import traceback

        *_, (frame, _) = traceback.walk_tb(end.__traceback__)
        # Click exits if standard output was closed.
        if str(frame.f_globals.get("__name__")).startswith("click."):
            raise
        # A task that was only loaded called sys.exit.
        report_failure(failure := called_exit(end))
        return failure.exit_code
    except click.Abort as abort:
        # Click reports an EOFError as Abort, for example that of a killed loader worker.
        is_ctrl_c = not isinstance(abort.__cause__, EOFError)
        if not is_ctrl_c:
            import traceback

            traceback.print_exception(abort.__cause__)
        return 130 if is_ctrl_c else 1
    except Exception:  # noqa: BLE001 - printed to the rank's own log as well
        import traceback

        traceback.print_exc()
        return 1
