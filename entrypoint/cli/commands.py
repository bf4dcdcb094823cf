"""The command `trainbox`.

It plans and supervises trainings, passes verbs to the trainer, or runs another program.
"""

import errno
import importlib
import os
import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

import click

from entrypoint.system.container import in_image
from entrypoint.system.environment import is_folder_of_script, without_ranks
from trainbox.commands import mistyped
from trainbox.commands.command_page import PAGE, failure_of
from trainbox.disclosure import suggested_commands
from trainbox.errors import Failure, WrongUse, stopped_without_loss
from trainbox.folders.write_failures import disk_is_full, storage_failure
from trainbox.processes.environment import user_environment
from trainbox.processes.process_tree import heeded_stop_signals, ignore_stop_signals
from trainbox.processes.streams import discard, message, open_streams

# The module and the help line of each verb. Only the module of the verb that runs is imported, so
# that a plan takes little longer than Python and click.
VERBS = {
    "bench": ("bench", "Measure the training speed by GPUs, batch size and workers."),
    "clean": ("runs", "Show what of the runs can go, and remove it."),
    "compare": ("runs", "Show what differs between runs, and draw their curves."),
    "config": ("stored", "Print the settings of a run."),
    "doctor": ("health", "Print a report to paste when you ask for help."),
    "drill": ("drill", "Check that kills do not change the result of a task or a script."),
    "evaluate": ("stored", "Compute the metrics of a run's checkpoint."),
    "export": ("stored", "Write the model of a run as a file that needs no Trainbox."),
    "health": ("health", "Check whether GPUs, driver and node are fit to train on."),
    "new": ("new", "Write the file of a task or a script, to change."),
    "plan": ("training", "Print as JSON what train would launch, and start nothing."),
    "predict": ("stored", "Predict files with the weights of a run."),
    "run": ("run", "Run your own script."),
    "runs": ("runs", "List the runs, with the settings that differ and the results."),
    "sweep": ("training", "Train a task for each combination of settings and each seed."),
    "tasks": ("stored", "List the tasks, or the fields of one task."),
    "train": ("training", "Train a task, or resume it."),
    "verify": ("stored", "Repeat a run, or compare two runs."),
}
# The modules of the verbs with a second part, such as `plan run SCRIPT`.
_FORMS = {"drill run": "drill", "plan run": "run", "sweep run": "training", "sweep show": "stored"}
# Verbs with the option --run.
_TRAINING_VERBS = ("plan", "train")


class Verbs(click.Group):
    """The verbs of the tables, each imported when it runs."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        return _imported(VERBS[cmd_name][0], cmd_name) if cmd_name in VERBS else None

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        form = " ".join(args[:2])
        if module := _FORMS.get(form):
            return form, _imported(module, form.replace(" ", "_")), args[2:]
        # A completion by the shell only parses.
        if args[0] not in VERBS and not ctx.resilient_parsing:
            raise _no_verb(args, _run_in_image(args) if in_image() else "")
        return super().resolve_command(ctx, args)

    def format_commands(
        self,
        ctx: click.Context,  # noqa: ARG002
        formatter: click.HelpFormatter,
    ) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(verb, line) for verb, (_, line) in VERBS.items()])


def _imported(module: str, name: str) -> click.Command:
    command: click.Command = getattr(importlib.import_module(f"entrypoint.cli.{module}"), name)
    return command


@click.group(cls=Verbs, context_settings=PAGE)
@click.version_option(package_name="trainbox", message="trainbox %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Find the GPUs, plan a launch, train, and prove what was done.

    \b
    Examples:
      trainbox train                           digits, on the hardware found here
      trainbox train mnist --gpus 2            two GPUs, torchrun DDP
      trainbox train my.py:Gestures --processes 2 --epochs 3
      trainbox plan mnist --gpus 3             print the launch plan and the reason
      trainbox health --gpus 2                 check that two GPUs are fit for training
      trainbox new my_tasks/mine.py            a short task of your own, to change
      trainbox run train.py -- --epochs 3      your own script, on all GPUs
      trainbox doctor                          a report to paste into an issue
      trainbox verify runs/digits-7d2c     repeat a run and compare the bits
      trainbox train --config runs/digits-7d2c/config.json --run again
      trainbox evaluate runs/digits-7d2c   compute the metrics of the best checkpoint
      trainbox export runs/digits-7d2c     write the best model as a file for torch
      trainbox predict runs/images-7d2c new/ > predictions.csv
      docker run IMAGE nvidia-smi              any other program
    """
    _check_folder()
    _drop_ranks(ctx.invoked_subcommand)


def _run_in_image(argv: list[str]) -> str:
    """Become another program, as in `docker run IMAGE nvidia-smi`, or return why not."""
    try:
        os.execvpe(argv[0], argv, user_environment(os.environ))
    except (OSError, ValueError) as error:  # ValueError: an empty argument
        return f", and no program that can be run ({getattr(error, 'strerror', error)})"


def _no_verb(argv: list[str], no_program: str) -> WrongUse:
    from entrypoint.script.accelerate import refuse_launcher
    from entrypoint.script.target import without_starter
    from trainbox.task_names.task_spec import built_in_tasks

    refuse_launcher(argv)
    hint = without_starter(argv[0], argv[1:])
    hint = hint or mistyped.unknown_verb(argv[0], argv[1:], list(VERBS))
    if argv[0] in built_in_tasks():
        hint = f"did you mean `{suggested_commands.command('train', shlex.join(argv))}`?"
    return WrongUse(f"'{argv[0]}' is no verb of trainbox{no_program}: {hint}")


def _check_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise WrongUse("the current folder was removed: change to another one") from None


def _drop_ranks(verb: str | None) -> None:
    for name in os.environ.keys() - without_ranks(os.environ):
        if verb in _TRAINING_VERBS and is_folder_of_script(name, os.environ[name]):
            message("TRAINBOX_RUN is a path, and so not a setting: --run NAME sets the run's name")
        del os.environ[name]


def main() -> NoReturn:
    """Run the console script, which is also the image's entrypoint."""
    open_streams()
    try:
        for number, handler in heeded_stop_signals().items():
            if handler is signal.SIG_DFL:  # of SIGINT: see trainbox_start
                signal.signal(number, _end)
        # Without arguments, click would exit with code 2.
        arguments = sys.argv[1:] or ["--help"]
        sys.exit(cli.main(arguments, prog_name="trainbox", standalone_mode=False) or 0)
    except (click.ClickException, Failure) as error:
        message(str(failure := failure_of(error)))
        sys.exit(failure.exit_code)
    except OSError as error:
        if disk_is_full(error):
            discard(sys.stdout.fileno())  # Python writes what the stream still has at its end
        elif error.errno != errno.EMFILE:
            raise
        failure = storage_failure(Path("/dev/stdout"), error, instead="write it to another disk")
        message(str(failure))
        sys.exit(failure.exit_code)
    except _Ended as ended:
        if ended.number != signal.SIGINT:  # the user knows of Ctrl-C
            message(stopped_without_loss(ended.number))
        raise
    except click.Abort:  # Ctrl-D at a question
        sys.exit(128 + signal.SIGINT)


class _Ended(SystemExit):
    """The end of a command by a signal. For a KeyboardInterrupt, click would print a line."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)
        self.number = number


def _end(number: int, _frame: FrameType | None) -> NoReturn:
    """End the command at a stop signal, so that its temporary files are removed.

    A second signal, as by `docker compose run`, does not end this.
    """
    ignore_stop_signals()
    raise _Ended(number)
