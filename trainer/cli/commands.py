"""Run `python -m trainer`: choose the command, and map its errors to exit codes."""

import signal
import sys
from collections.abc import Callable
from typing import NoReturn

import click

from trainbox.contract.errors import ExitCode, Failure, called_exit
from trainbox.contract.usage import PAGE, failure_of
from trainer.cli import verbs
from trainer.system.report import report_failure

# Commands that continue without a reader of their output.
_LONG = ("evaluate", "sweep", "sweep-run", "train", "verify")


@click.group(context_settings=PAGE, commands=verbs.ALL)
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Train a task on the devices of this process. `trainbox` plans and starts this command."""
    if ctx.invoked_subcommand in _LONG:
        ctx.obj()


def main(on_long: Callable[[], None] = lambda: None) -> NoReturn:
    """Run the command of this process's arguments, and exit. A long one first calls `on_long`."""
    sys.exit(_run(on_long))


def _run(on_long: Callable[[], None]) -> int:
    """Run the command, report its error, and return the exit code."""
    try:
        return int(cli.main(prog_name="trainbox", standalone_mode=False, obj=on_long) or 0)
    except (click.ClickException, Failure) as error:
        report_failure(failure := failure_of(error))
        return failure.exit_code
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
        return 128 + signal.SIGINT if is_ctrl_c else ExitCode.UNEXPECTED
    except Exception:  # noqa: BLE001 - printed to the rank's own log as well
        import traceback

        traceback.print_exc()
        return ExitCode.UNEXPECTED
