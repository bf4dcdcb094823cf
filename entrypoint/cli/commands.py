"""The command `trainbox`.

It plans and supervises trainings, passes verbs to the trainer, or runs another program.
"""

import contextlib
import dataclasses
import json
import os
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click

from entrypoint.cli.bench import bench
from entrypoint.cli.drill import drill, drill_run
from entrypoint.cli.health import doctor, health
from entrypoint.cli.options import (
    PAGE,
    PASS_ON,
    Option,
    device_options,
    environment_names,
    launch_options,
    refuse_unused,
)
from entrypoint.cli.planning import Checked, make_plan, settings_text
from entrypoint.cli.run import plan_run, run
from entrypoint.driver.gpus import Gpu
from entrypoint.errors import WRONG_USE, InvalidRequest, LaunchError
from entrypoint.launch.cluster import detect_cluster
from entrypoint.launch.plan import LaunchPlan, plan_launch, plan_sweep
from entrypoint.launch.request import LaunchRequest
from entrypoint.launch.supervise import REPETITION, TRAINING, Child, supervise
from entrypoint.system import hints
from entrypoint.system.commands import check_packages, command_of, without_ranks
from entrypoint.system.forks import ForkedModule
from entrypoint.system.streams import message, open_streams

# Verbs that were renamed, and the verb and arguments that replace them.
_RENAMED = {
    "diff": ("verify", "RUN_A RUN_B"),
    "gpus": ("health", "--list"),
    "replay": ("verify", "RUN --print-docker"),
}


def _help_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add `--help` and `--help-all` with the launch options and the trainer's options."""
    for names, whole, text in (
        (["--help-all"], True, "Show all options."),
        (["--help", "-h"], False, "Show the everyday options."),
    ):
        command = click.option(
            *names,
            is_flag=True,
            is_eager=True,
            expose_value=False,
            callback=_help_of_train(whole),
            help=text,
        )(command)
    return command


def _help_of_train(whole: bool) -> Callable[[click.Context, click.Parameter, bool], None]:
    def show(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            _show_help(ctx, "train", whole)

    return show


def _show_help(ctx: click.Context, verb: str, whole: bool) -> NoReturn:
    """Print the launch options, and let the trainer print its options below."""
    formatter = ctx.make_formatter()
    ctx.command.format_usage(ctx, formatter)
    ctx.command.format_help_text(ctx, formatter)
    options = [param for param in ctx.command.get_params(ctx) if isinstance(param, Option)]
    if whole:
        sections = {option.section: f"{option.section} options" for option in options}
    else:
        options = [option for option in options if option.everyday]
        sections = {option.section: "Launch options" for option in options}
    for section, title in sections.items():
        records = [option.get_help_record(ctx) for option in options if option.section == section]
        with formatter.section(title):
            formatter.write_dl([record for record in records if record])
    click.echo(formatter.getvalue())
    _hand_over(verb, "--help-all-options" if whole else "--help-options")


class Verbs(click.Group):
    """The verbs. Some have another form for a user's own script, such as `plan run SCRIPT`."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[1:2] == ["run"] and (form := _RUN_FORMS.get(args[0])):
            return f"{args[0]} run", form, args[2:]
        return super().resolve_command(ctx, args)


# The forms of verbs for a user's own script.
_RUN_FORMS: dict[str, click.Command] = {"drill": drill_run, "plan": plan_run}


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
@_help_options
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
    _supervised(*_checked_plan(training, options))


@cli.command(
    context_settings=PASS_ON,
    options_metavar="[OPTIONS]",
    short_help="Print as JSON what train would launch, and start nothing.",
)
@launch_options
@_help_options
@click.argument("training", nargs=-1, type=click.UNPROCESSED, metavar="[TASK]")
def plan(training: tuple[str, ...], **options: Any) -> None:
    """Print as JSON what `train` would launch with the same arguments, and why; start nothing.

    \b
    Examples:
      trainbox plan mnist --gpus 3
      GPU_IDS=0,2 trainbox plan
    """
    decided, _ = _checked_plan(training, options)
    click.echo(json.dumps(dataclasses.asdict(decided), indent=2))


for command in (bench, doctor, drill, health, run):
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
        _hand_over("verify", str(run), str(other))
    if print_docker:
        refuse_unused(f"verify {run} --print-docker", {"run", "print_docker", "data_dir"})
        from entrypoint.replay import docker_command, read_run

        user = f"{os.getuid()}:{os.getgid()}"
        click.echo(shlex.join(docker_command(run, *read_run(run), data_dir, user)))
        return
    arguments = [str(run), "--data-dir", str(data_dir)]
    arguments += [] if steps is None else ["--steps", steps]
    _supervised(*_checked_plan(tuple(arguments), options, verb="verify"), kind=REPETITION)


@cli.command(
    context_settings=PASS_ON,
    options_metavar="[OPTIONS]",
    short_help="Train a task for each combination of settings and each seed.",
)
@device_options
@click.option(
    "--per-gpu",
    cls=Option,
    type=click.IntRange(1),
    default=1,
    metavar="K",
    help="Trials that share a GPU. Default: 1.",
)
@click.option("--help", "-h", "wants_help", is_flag=True, help="Show the everyday options.")
@click.option("--help-all", "wants_all_help", is_flag=True, help="Show all options.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="TASK")
def sweep(
    arguments: tuple[str, ...], per_gpu: int, wants_help: bool, wants_all_help: bool, **options: Any
) -> None:
    """Train TASK for each combination of settings and each seed, on all GPUs or on N CPU slots
    (--processes N).

    `trainbox sweep show NAME` prints the results so far.

    \b
    Examples:
      trainbox sweep digits --seeds 20 --grid width=8,16,32 --grid lr=1e-3,3e-3
      trainbox sweep my.py:Gestures --sampler tpe --trials 50 --range lr=1e-4:1e-1:log
      trainbox sweep mnist --seeds 100 --per-gpu 4 --name course
      trainbox sweep mnist --seeds 100 --name course --worker    on a second machine
      trainbox sweep show course --csv
    """
    if arguments[:1] == ("show",):
        _hand_over(
            "sweep-show", *arguments[1:], *(["--help"] if wants_help or wants_all_help else [])
        )
    if wants_help or wants_all_help:
        _show_help(click.get_current_context(), "sweep", wants_all_help)
    _supervised(
        *_checked_plan(
            arguments, options, "sweep", lambda request, gpus: plan_sweep(request, gpus, per_gpu)
        )
    )


@cli.command(context_settings=PASS_ON, short_help="List the tasks, or the fields of one task.")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def tasks(rest: tuple[str, ...]) -> None:
    """List the tasks, or one task's fields: `trainbox tasks mnist`."""
    _hand_over("tasks", *rest)


def _supervised(plan: LaunchPlan, checked: Checked, kind: Child = TRAINING) -> NoReturn:
    # Without a fixed hash seed, Python orders sets of strings differently at each start.
    env = {"PYTHONHASHSEED": "0", **os.environ, **plan.env}
    from entrypoint.system.temporary import temporary_folder

    with contextlib.ExitStack() as stack:
        # The trainer creates this file when it has finished. An exit code of 0 is not proof.
        finished = stack.enter_context(temporary_folder("run-")) / "finished"
        env["TRAINBOX_FINISHED"] = str(finished)
        watch = None
        if checked.driver is not None and checked.health and plan.gpus:
            from entrypoint.health.gate import watched

            watch = stack.enter_context(watched(plan, checked.driver, checked.health_limits))
            env["TRAINBOX_HEALTH_EVENTS"] = str(watch.events)
        elif checked.driver is not None:
            checked.driver.close()
        code = supervise(plan.argv, env, watch=watch, kind=kind).code
        if code == 0 and not finished.exists():
            message(
                "the training exited with code 0 before it was finished: "
                "does the task call os._exit?"
            )
            code = 1
    sys.exit(code)


def _hand_over(*arguments: str) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, command_of("trainer", *arguments))


def _planned_launch(request: LaunchRequest, gpus: tuple[Gpu, ...]) -> LaunchPlan:
    return plan_launch(request, gpus, detect_cluster(os.environ))


def _checked_plan(
    training: tuple[str, ...],
    options: dict[str, Any],
    verb: str = "train",
    decide: Callable[[LaunchRequest, tuple[Gpu, ...]], LaunchPlan] = _planned_launch,
) -> tuple[LaunchPlan, Checked]:
    """Build the launch plan while a fork validates the training options without torch.

    If both fail, report the training options' error.
    """
    checked = Checked(options.pop("health"), options.pop("health_limits"))
    if checked.health_limits:
        from entrypoint.health.limits import read_limits

        # report a wrong file before the GPUs are examined
        read_limits(checked.health_limits)
    checking = ForkedModule("trainer", verb, "--check", "--device-on-stdin", *training)
    decided = ""
    try:
        plan = make_plan(("trainer", verb, *training), options, decide, checked)
        decided = f"{plan.env['TRAINBOX_DEVICE']}\n{plan.strategy}"
    finally:
        printed = checking.communicate(decided + "\n")
        if checking.returncode:
            sys.exit(checking.returncode)
    # The last line names the settings from the environment, unless a task that was loaded for the
    # check printed another.
    reported = [name for name in "".join(printed.splitlines()[-1:]).split() if name in os.environ]
    names = [*environment_names(click.get_current_context()), *reported]
    if names:
        plan = dataclasses.replace(
            plan, env={**plan.env, "TRAINBOX_SETTINGS": settings_text(names)}
        )
    return plan, checked


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


def _drop_ranks() -> None:
    for name in os.environ.keys() - without_ranks(os.environ):
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
        if not (arguments[:1] == ["run"] or arguments[1:2] == ["run"]):
            # A script's own folders are only in the sys.path of its ranks.
            check_packages(sys.path)
        _drop_ranks()
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
