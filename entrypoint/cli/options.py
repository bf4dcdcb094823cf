"""The options that several verbs share: those of a launch, of folders and of a stored run."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from entrypoint.launch.cluster import RDZV_TIMEOUT_S
from trainbox.contract.errors import WrongUse

PAGE = {"help_option_names": ["--help", "-h"], "max_content_width": 110}
PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}
# The most processes of a machine. trainer/launch/messages.py has the same limit for each node.
MOST_PROCESSES = 4096


class Option(click.Option):
    """An option with its section of the help page: `--help` shows the everyday options,
    `--help-all` all of them in sections.
    """

    def __init__(
        self, *names: Any, section: str = "Launch", everyday: bool = False, **attributes: Any
    ) -> None:
        super().__init__(*names, **attributes)
        self.section, self.everyday = section, everyday


class GpuCount(click.ParamType[int | str]):
    """A number of GPUs, or `all`."""

    name = "N|all"

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002
        return self.name

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> int | str:
        if value == "all" or isinstance(value, int):
            return "all" if value == "all" else int(value)
        if not (value.isascii() and value.isdigit()):
            self.fail(
                f"{value!r} is neither a number of GPUs nor `all`: to name GPUs use "
                f"--gpu-ids {value}",
                param,
                ctx,
            )
        return int(value)


class Numbers(click.ParamType[tuple[int, ...]]):
    """A list of different whole numbers of at least `low`, as in 1,2,4. Returned in order."""

    name = "N,N,..."

    def __init__(self, low: int) -> None:
        self.low = low

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:  # noqa: ARG002
        return self.name

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        texts = value.split(",")
        if not all(text.isascii() and text.isdigit() and int(text) >= self.low for text in texts):
            self.fail(
                f"{value!r} is not a list of whole numbers from {self.low}, such as "
                f"{self.low},{2 * self.low + 2}",
                param,
                ctx,
            )
        if len(set(map(int, texts))) < len(texts):
            self.fail(f"{value!r} repeats a number: give each number once", param, ctx)
        return tuple(sorted(map(int, texts)))


class StrategyChoice(click.Choice[str]):
    """A launch strategy, with a hint for the removed value `single`."""

    def __init__(self) -> None:
        super().__init__(["ddp", "fsdp", "dp"])

    def get_invalid_choice_message(self, value: Any, ctx: click.Context | None) -> str:
        if value == "single":
            return "'single' was removed: use --gpus 1, or --processes 1 on the CPU"
        return super().get_invalid_choice_message(value, ctx)


_DEVICE_OPTIONS = [
    click.option(
        "--gpus",
        cls=Option,
        everyday=True,
        type=GpuCount(),
        envvar="GPUS",
        help="Number of GPUs; 0 is the CPU. Default: all visible.",
    ),
    click.option(
        "--gpu-ids",
        cls=Option,
        everyday=True,
        metavar="IDS",
        envvar="GPU_IDS",
        help="The GPUs to use: 0,2 or UUIDs, or 0:1 for a MIG slice.",
    ),
    click.option(
        "--processes",
        cls=Option,
        everyday=True,
        type=click.IntRange(1, MOST_PROCESSES),
        metavar="N",
        envvar="PROCESSES",
        help="Number of CPU processes: torchrun DDP over gloo, or a sweep's trials at a time.",
    ),
    click.option(
        "--device",
        cls=Option,
        type=click.Choice(["auto", "cuda", "mps", "cpu"]),
        envvar=["DEVICE", "TRAINBOX_DEVICE"],
        help="Device to train on. Default: auto, which is cuda if there are GPUs.",
    ),
]
health_limits_option = click.option(
    "--health-limits",
    cls=Option,
    section="Health",
    type=click.Path(path_type=Path),
    envvar="HEALTH_LIMITS",
    metavar="FILE",
    help="TOML file that overrides limits: docs/guides/health.md.",
)
runs_dir_option = click.option(
    "--runs-dir",
    type=click.Path(path_type=Path),
    default=Path("runs"),
    envvar="TRAINBOX_RUNS_DIR",
    metavar="FOLDER",
    help="Folder of the runs. Default: runs.",
)
data_dir_option = click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=Path("data"),
    envvar="TRAINBOX_DATA_DIR",
    metavar="FOLDER",
    help="Folder of the datasets. Default: data.",
)
_STORED_RUN_OPTIONS = [
    click.option(
        "--checkpoint",
        type=click.Choice(["best", "last"]),
        default="best",
        help="The weights of the best validation (default), or of the newest checkpoint.",
    ),
    data_dir_option,
    click.option("--anyway", is_flag=True, help="Accept changed source files of the task."),
]
_HEALTH_OPTIONS = [
    click.option(
        "--health/--no-health",
        cls=Option,
        section="Health",
        default=True,
        envvar="HEALTH",
        help="Check the GPUs before the training, watch them during it, and exit with code 3 if "
        "they fail. Default: yes.",
    ),
    health_limits_option,
]
_STRATEGY_OPTIONS = [
    click.option(
        "--strategy",
        cls=Option,
        everyday=True,
        type=StrategyChoice(),
        envvar="STRATEGY",
        help="ddp: torchrun, one process per GPU. fsdp: the same, each with a share of a model "
        "that is too large for one GPU. dp: DataParallel. Default: ddp on 2 GPUs or more.",
    ),
]
_NODE_OPTIONS = [
    click.option(
        "--nnodes",
        cls=Option,
        section="Cluster",
        type=click.IntRange(1),
        metavar="N",
        envvar="NNODES",
        help="Number of machines. Default: the scheduler's value.",
    ),
    click.option(
        "--node-rank",
        cls=Option,
        section="Cluster",
        type=click.IntRange(0),
        metavar="N",
        envvar="NODE_RANK",
        help="This machine's number, from 0.",
    ),
    click.option(
        "--rdzv-endpoint",
        cls=Option,
        section="Cluster",
        metavar="HOST:PORT",
        envvar="RDZV_ENDPOINT",
        help="Address of the rendezvous, on node 0.",
    ),
    click.option(
        "--rdzv-id",
        cls=Option,
        section="Cluster",
        metavar="TEXT",
        envvar="RDZV_ID",
        help="Name of the job at the rendezvous, the same on all machines.",
    ),
    click.option(
        "--rdzv-timeout-s",
        cls=Option,
        section="Cluster",
        type=click.IntRange(1),
        default=RDZV_TIMEOUT_S,
        metavar="SECONDS",
        envvar="RDZV_TIMEOUT_S",
        help=f"Seconds to wait for the other machines. Default: {RDZV_TIMEOUT_S}.",
    ),
    # RDZV_SECRET and RDZV_SECRET_FILE have no option: every user of a machine can read the
    # arguments of a process. trainer.launch.secret reads them.
]


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that select GPUs or CPU slots and their health check."""
    for option in reversed([*_DEVICE_OPTIONS, *_HEALTH_OPTIONS]):
        command = option(command)
    return command


def launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the device options, and those of a job of several processes or machines."""
    for option in reversed([*_STRATEGY_OPTIONS, *_NODE_OPTIONS]):
        command = option(command)
    return device_options(command)


def stored_run_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the launch options, and those of a verb that uses the weights of a run."""
    for option in reversed(_STORED_RUN_OPTIONS):
        command = option(command)
    return launch_options(command)


def script_launch_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the launch options of a user's own script, which itself knows its strategy."""
    for option in reversed(_NODE_OPTIONS):
        command = option(command)
    return device_options(command)


def refuse_unused(invocation: str, used: set[str]) -> None:
    """Refuse the options on the command line that this invocation of a verb would ignore.

    Variables in the environment are not refused, because make and Compose set them for each verb.

    Args:
        invocation: the verb and its arguments, for the message.
        used: the names of the parameters that the invocation uses.

    Raises:
        WrongUse: the command line has another option.
    """
    ctx = click.get_current_context()
    unused = [
        "/".join([*param.opts, *param.secondary_opts])
        for param in ctx.command.params
        if param.name
        and param.name not in used
        and ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
    ]
    if unused:
        raise WrongUse(
            f"{invocation} got options that it does not use ({', '.join(unused)}): drop them"
        )


def environment_names(ctx: click.Context) -> list[str]:
    """Return the environment variables that have set an option."""
    given = [
        param
        for param in ctx.command.params
        if param.name
        and ctx.get_parameter_source(param.name) is click.core.ParameterSource.ENVIRONMENT
    ]
    variables = [
        [param.envvar] if isinstance(param.envvar, str) else param.envvar or [] for param in given
    ]
    return [next(name for name in names if os.environ.get(name)) for names in variables]
