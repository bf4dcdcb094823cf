"""The command `trainbox`.

It plans and supervises trainings, passes verbs to the trainer, or runs another program.
"""

import dataclasses
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any, NoReturn

import click

from entrypoint.cli.bench import bench
from entrypoint.cli.drill import drill, drill_run
from entrypoint.cli.health import doctor, health
from entrypoint.cli.help_pages import help_options
from entrypoint.cli.launching import checked_plan, hand_over, supervised
from entrypoint.cli.options import (
    PAGE,
    PASS_ON,
    launch_options,
    refuse_unused,
)
from entrypoint.cli.run import plan_run, run
from entrypoint.cli.sweep import sweep, sweep_run
from entrypoint.errors import WRONG_USE, InvalidRequest, LaunchError
from entrypoint.launch.supervise import TRAINING, UNSAVED_TRAINING
from entrypoint.system import hints
from entrypoint.system.commands import check_packages, is_folder_of_script, without_ranks
from entrypoint.system.streams import message, open_streams

# Verbs that were renamed, and the verb and arguments that replace them.
_RENAMED = {
    "diff": ("verify", "RUN_A RUN_B"),
    "gpus": ("health", "--list"),
    "replay": ("verify", "RUN --print-docker"),
}
# Verbs with the option --run.
_TRAINING_VERBS = ("plan", "train")


class Verbs(click.Group):
    """The verbs. Some have another form for a user's own script, such as `plan run SCRIPT`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[1:2] == ["run"] and (form := _RUN_FORMS.get(args[0])):
            return f"{args[0]} run", form, args[2:]
        return super().resolve_command(ctx, args)


# The forms of verbs for a user's own script.
_RUN_FORMS: dict[str, click.Command] = {
    "drill": drill_run,
    "plan": plan_run,
    "sweep": sweep_run,
}


@click.group(cls=Verbs, context_settings=PAGE)
@click.version_option(package_name="trainbox", message="trainbox %(version)s")
def cli() -> None:
    """Find the GPUs, plan a launch, train, and prove what was done.

    \b
    Examples:
      trainbox train                           digits, on the hardware found here
      trainbox train mnist --gpus 2            two GPUs, torchrun DDP
      trainbox train my.py:Gestures --processes 2 --epochs 3
      trainbox plan mnist --gpus 3             print the launch plan and the reason
      trainbox health --gpus 2                 check that two GPUs are fit for training
      trainbox run train.py -- --epochs 3      your own script, on all GPUs
      trainbox doctor                          a report to paste into an issue
      trainbox verify runs/digits-7d2c1a90     repeat a run and compare the bits
      docker run IMAGE nvidia-smi              any other program
    """


@cli.command(
    context_settings=PASS_ON, options_metavar="[OPTIONS]", short_help="Train a task, or resume it."
)
@launch_options
@help_options
@click.argument("training", nargs=-1, type=click.UNPROCESSED, metavar="[TASK]")
def train(training: tuple[str, ...], **options: Any) -> None:
    """Train TASK (default: digits), or resume a stopped run of the same command.

    \b
    Examples:
      trainbox train                                     digits on the hardware found here
      trainbox train mnist --gpus 2 --epochs 5           two GPUs
      trainbox train fashion_mnist --batch-size 512 --lr 0.002 --lr-scaling linear
      trainbox train my_tasks/gestures.py:Gestures --set width=64
      trainbox train --processes 2 --device cpu          two gloo processes, without a GPU
    """
    # The bench removes the run folder, so nothing resumes.
    kind = UNSAVED_TRAINING if "--measure-seconds" in training else TRAINING
    supervised(*checked_plan(training, options), kind=kind)


@cli.command(
    context_settings=PASS_ON,
    options_metavar="[OPTIONS]",
    short_help="Print as JSON what train would launch, and start nothing.",
)
@launch_options
@help_options
@click.argument("training", nargs=-1, type=click.UNPROCESSED, metavar="[TASK]")
def plan(training: tuple[str, ...], **options: Any) -> None:
    """Print as JSON what `train` would launch with the same arguments, and why; start nothing.

    \b
    Examples:
      trainbox plan mnist --gpus 3
      GPU_IDS=0,2 trainbox plan
    """
    decided, _ = checked_plan(training, options)
    click.echo(json.dumps(dataclasses.asdict(decided), indent=2))


for command in (bench, doctor, drill, health, run, sweep):
    cli.add_command(command)


@cli.command(short_help="Repeat a run, or compare two runs.")
@launch_options
@click.option("--steps", metavar="N", help="Repeat the first N steps. Default: the whole run.")
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=Path("data"),
    envvar="TRAINBOX_DATA_DIR",
    metavar="FOLDER",
    help="Folder of the datasets. Default: data.",
)
@click.option(
    "--print-docker",
    is_flag=True,
    help="Print the docker command that repeats RUN with the same image; start nothing.",
)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("other", required=False, type=click.Path(path_type=Path))
def verify(
    run: Path,
    other: Path | None,
    steps: str | None,
    data_dir: Path,
    print_docker: bool,
    **options: Any,
) -> None:
    """Repeat RUN and compare the bits, or compare RUN with the run OTHER without training.

    If they differ, the exit code is 8. The message names the first recorded step and the first
    tensor that differ, and the manifest entries that differ.

    \b
    Examples:
      trainbox verify runs/digits-7d2c1a90
      trainbox verify runs/digits-7d2c1a90 --steps 100
      trainbox verify runs/digits-7d2c1a90 runs/digits-7d2c1a90-replay
      trainbox verify runs/digits-7d2c1a90 --print-docker | sh
    """
    if other is not None:
        refuse_unused(f"verify {run} {other}", {"run", "other"})
        hand_over("verify", str(run), str(other))
    if print_docker:
        refuse_unused(f"verify {run} --print-docker", {"run", "print_docker", "data_dir"})
        from entrypoint.replay import docker_command, read_run

        user = f"{os.getuid()}:{os.getgid()}"
        click.echo(shlex.join(docker_command(run, *read_run(run), data_dir, user)))
        return
    arguments = [str(run), "--data-dir", str(data_dir)]
    arguments += [] if steps is None else ["--steps", steps]
    supervised(*checked_plan(tuple(arguments), options, verb="verify"), kind=UNSAVED_TRAINING)


@cli.command(context_settings=PASS_ON, short_help="List the tasks, or the fields of one task.")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def tasks(rest: tuple[str, ...]) -> None:
    """List the tasks, or one task's fields: `trainbox tasks mnist`."""
    hand_over("tasks", *rest)


def _run_verbatim(argv: list[str]) -> NoReturn:
    try:
        os.execvp(argv[0], argv)
    except (OSError, ValueError) as error:  # ValueError: an empty argument
        import difflib

        verbs = sorted(cli.commands)
        close = difflib.get_close_matches(argv[0], verbs, n=1)
        hint = f"did you mean `{close[0]}`?" if close else f"the verbs are {', '.join(verbs)}"
        raise InvalidRequest(
            f"'{argv[0]}' is neither a verb nor a program that can be run "
            f"({getattr(error, 'strerror', error)}): {hint}"
        ) from error


def _drop_ranks(verb: str) -> None:
    for name in os.environ.keys() - without_ranks(os.environ):
        if verb in _TRAINING_VERBS and is_folder_of_script(name, os.environ[name]):
            message("TRAINBOX_RUN is a path, and so not a setting: --run NAME sets the run's name")
        del os.environ[name]


def main() -> NoReturn:
    """Run the console script, which is also the image's entrypoint."""
    open_streams()
    arguments = sys.argv[1:]
    try:
        if arguments and arguments[0] in _RENAMED:
            raise InvalidRequest(
                f"the verb {arguments[0]} was renamed: use "
                f"`{hints.command(*_RENAMED[arguments[0]])}`"
            )
        if arguments and not arguments[0].startswith("-") and arguments[0] not in cli.commands:
            _run_verbatim(arguments)
        runs_script = arguments[:1] == ["run"] or arguments[1:2] == ["run"]
        if not runs_script or arguments[:1] == ["sweep"]:
            # A script's own folders are only in the sys.path of its ranks.
            check_packages(sys.path)
        _drop_ranks("" if runs_script else " ".join(arguments[:1]))
        sys.exit(
            cli.main(arguments or ["--help"], prog_name="trainbox", standalone_mode=False) or 0
        )
    except click.ClickException as error:
        message(error.format_message())
        sys.exit(WRONG_USE)
    except LaunchError as error:
        message(str(error))
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
