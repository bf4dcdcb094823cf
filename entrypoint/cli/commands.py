"""`trainbox`: verbs that are planned and supervised, verbs answered here, and anything else run as
it stands.
"""

import contextlib
import dataclasses
import difflib
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click

from entrypoint.cli.health import doctor, health
from entrypoint.cli.options import Numbers, device_options, environment_names, launch_options
from entrypoint.driver.gpus import Gpu, visible_gpus
from entrypoint.driver.process import Driver, NoAnswer
from entrypoint.errors import PREEMPTED, WRONG_USE, HardwareMissing, InvalidRequest, LaunchError
from entrypoint.launch.cluster import detect_cluster
from entrypoint.launch.plan import LaunchPlan, LaunchRequest, plan_launch, plan_sweep
from entrypoint.launch.supervise import supervise
from entrypoint.system.commands import check_packages, command_of, without_ranks
from entrypoint.system.cpus import usable_cpus
from entrypoint.system.streams import message, open_streams

if TYPE_CHECKING:
    from entrypoint.driver.nvml import Detection

_ALL_THE_SAME = "to train without GPUs all the same: --device cpu"
_PAGE = {"help_option_names": ["--help", "-h"], "max_content_width": 110}
_PASS_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@dataclasses.dataclass
class Checked:
    """Beside a plan: whether to look at the GPUs' health, and the driver to ask, which was asked
    for the plan already.
    """

    health: bool
    health_limits: Path | None
    driver: Driver | None = None


def _whole_help(ctx: click.Context, _param: click.Parameter, value: bool) -> None:
    """Launch options from here and training options from the trainer, on one page."""
    if value and not ctx.resilient_parsing:
        _show_whole_help(ctx, "train")


def _show_whole_help(ctx: click.Context, verb: str) -> NoReturn:
    formatter = ctx.make_formatter()
    ctx.command.format_usage(ctx, formatter)
    ctx.command.format_help_text(ctx, formatter)
    options = [p for p in ctx.command.get_params(ctx) if isinstance(p, click.Option)]
    records = [record for option in options if (record := option.get_help_record(ctx))]
    with formatter.section("Launch options"):
        formatter.write_dl(records)
    click.echo(formatter.getvalue())
    _hand_over(verb, "--help-options")


_help_option = click.option(
    "--help",
    "-h",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_whole_help,
    help="Show this page.",
)


@click.group(context_settings=_PAGE)
@click.version_option(package_name="trainbox", message="trainbox %(version)s")
def cli() -> None:
    """Find the GPUs, plan a launch, train, and prove what was done.

    \b
    Examples:
      trainbox train                           digits, on whatever is here
      trainbox train mnist --gpus 2            two GPUs, torchrun DDP
      trainbox train my.py:Gestures --processes 2 --epochs 3
      trainbox plan mnist --gpus 3             what would be launched, and why
      trainbox health --gpus 2                 are two GPUs there, and fit to train on?
      trainbox doctor                          what a helper will ask for, to paste into an issue
      trainbox verify runs/digits-7d2c1a90     do a run again and compare the bits
      docker run IMAGE nvidia-smi              anything else is run as it stands
    """


@cli.command(
    context_settings=_PASS_ON, options_metavar="[OPTIONS]", short_help="Train a task, or resume it."
)
@launch_options
@_help_option
@click.argument("training", nargs=-1, type=click.UNPROCESSED, metavar="[TASK]")
def train(training: tuple[str, ...], **options: Any) -> None:
    """Train TASK (default: digits) and go on where a stopped run of the same command ended.

    \b
    Examples:
      trainbox train                                     digits on whatever is here
      trainbox train mnist --gpus 2 --epochs 5           two GPUs
      trainbox train fashion_mnist --batch-size 512 --lr 0.002 --lr-scaling linear
      trainbox train my_tasks/gestures.py:Gestures --set width=64
      trainbox train --processes 2 --device cpu          two gloo processes, without a GPU
    """
    _supervised(*_checked_plan(training, options))


@cli.command(
    context_settings=_PASS_ON,
    options_metavar="[OPTIONS]",
    short_help="Print as JSON what train would launch, and start nothing.",
)
@launch_options
@_help_option
@click.argument("training", nargs=-1, type=click.UNPROCESSED, metavar="[TASK]")
def plan(training: tuple[str, ...], **options: Any) -> None:
    """Print as JSON what `train` with the same words would launch, and why; start nothing.

    \b
    Examples:
      trainbox plan mnist --gpus 3
      GPU_IDS=0,2 trainbox plan
    """
    decided, _ = _checked_plan(training, options)
    click.echo(json.dumps(dataclasses.asdict(decided), indent=2))


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="One JSON array instead of lines.")
def gpus(as_json: bool) -> None:
    """List the visible GPUs and MIG slices.

    \b
    Examples:
      trainbox gpus
      trainbox gpus --json
    """
    found = _detected(Driver())
    visible = _visible(found)
    if as_json:
        click.echo(json.dumps([dataclasses.asdict(gpu) for gpu in visible], indent=2))
        return
    _list_gpus(visible, found)


cli.add_command(health)
cli.add_command(doctor)


def _list_gpus(gpus: tuple[Gpu, ...], found: "Detection") -> None:
    if found.driver_version:
        click.echo(f"NVIDIA driver {found.driver_version}")
    for gpu in gpus:
        click.echo(
            f"GPU {gpu.label}  {gpu.name}  {gpu.memory_mib} MiB  "
            f"{gpu.uuid}{f'  {gpu.fault}' if gpu.fault else ''}"
        )
    if not gpus:
        click.echo(
            "no GPU visible: "
            f"{found.absent or 'the driver lists none, or CUDA_VISIBLE_DEVICES hides them'}"
        )


@cli.command(
    context_settings=_PASS_ON,
    options_metavar="[OPTIONS]",
    short_help="Repeat a run and compare its bits.",
)
@launch_options
@click.option("--help", "-h", "wants_help", is_flag=True, help="Show this page.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="RUN")
def verify(words: tuple[str, ...], wants_help: bool, **options: Any) -> None:
    """Do RUN again and compare: exit 8 if the bits differ, naming the first step, the first tensor
    and the settings.
    """
    if wants_help:
        _hand_over("verify", "--help")
    _supervised(*_checked_plan(words, options, verb="verify"), resumes=False)


@cli.command(
    context_settings=_PASS_ON,
    options_metavar="[OPTIONS]",
    short_help="Train a task for each combination of settings and each seed.",
)
@device_options
@click.option(
    "--per-gpu",
    type=click.IntRange(1),
    default=1,
    metavar="K",
    help="Trials that share a GPU. Default: 1.",
)
@click.option("--help", "-h", "wants_help", is_flag=True, help="Show this page.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="TASK")
def sweep(words: tuple[str, ...], per_gpu: int, wants_help: bool, **options: Any) -> None:
    """Train TASK for each combination of settings and each seed, on all GPUs (or CPU slots:
    --processes N).

    `trainbox sweep show NAME` prints what came out up to now.

    \b
    Examples:
      trainbox sweep digits --seeds 20 --grid width=8,16,32 --grid lr=1e-3,3e-3
      trainbox sweep my.py:Gestures --sampler tpe --trials 50 --range lr=1e-4:1e-1:log
      trainbox sweep mnist --seeds 100 --per-gpu 4 --name course
      trainbox sweep mnist --seeds 100 --name course --worker    on a second machine
      trainbox sweep show course --csv
    """
    if words[:1] == ("show",):
        _hand_over("sweep-show", *words[1:], *(["--help"] if wants_help else []))
    if wants_help:
        _show_whole_help(click.get_current_context(), "sweep")
    _supervised(
        *_checked_plan(
            words, options, "sweep", lambda request, gpus: plan_sweep(request, gpus, per_gpu)
        )
    )


@cli.command(context_settings=_PASS_ON, short_help="Compare the digests of two runs.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
def diff(words: tuple[str, ...]) -> None:
    """Compare two runs: `trainbox diff RUN_A RUN_B`."""
    _hand_over("diff", *words)


@cli.command(short_help="Print the docker command that repeats a run.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option(
    "--data-dir",
    type=click.Path(path_type=Path),
    default=Path("data"),
    help="Where datasets lie. Default: data.",
)
@click.option("--execute", is_flag=True, help="Run the command instead of printing it.")
def replay(run: Path, data_dir: Path, execute: bool) -> None:
    """Print the docker command that does RUN again: the same image, by its digest, settings,
    processes and GPUs.

    \b
    Examples:
      trainbox replay runs/digits-7d2c1a90
      trainbox replay runs/digits-7d2c1a90 --execute && trainbox diff runs/digits-7d2c1a90{,-replay}
    """
    from entrypoint.replay import read_run, replay_command

    config, manifest = read_run(run)
    command = replay_command(run, config, manifest, data_dir, f"{os.getuid()}:{os.getgid()}")
    if execute:
        _run_verbatim(command)
    click.echo(shlex.join(command))


@cli.command(short_help="Check that a task trains to the same bits through kills.")
@click.argument("tasks", nargs=-1, envvar="TASK")
@click.option(
    "--shards", type=click.IntRange(1), default=4, metavar="V", help="Parts of a batch. Default: 4."
)
@click.option(
    "--steps",
    type=click.IntRange(10),
    default=60,
    metavar="N",
    help="Length of each training. Default: 60.",
)
@click.option(
    "--seed",
    type=click.IntRange(0),
    metavar="N",
    help="Of the moments of the kills. Default: another each time.",
)
@click.option("--cpu", is_flag=True, help="On CPU processes, though there are GPUs.")
def drill(tasks: tuple[str, ...], shards: int, steps: int, seed: int | None, cpu: bool) -> None:
    """Show that TASKS (default: digits and digits_augmented) train to the same bits whatever
    happens.

    Each is trained on 1 to V processes (or GPUs), then killed at random steps and resumed on other
    numbers of them. Training options come from the environment: TRAINBOX_BATCH_SIZE=256 trainbox
    drill my.py:Gestures

    \b
    Examples:
      trainbox drill
      trainbox drill my_tasks/gestures.py:Gestures --steps 200
    """
    import random
    import secrets

    from entrypoint.drill import drill_task  # these would cost a start of training 6 ms

    seed = secrets.randbelow(10**6) if seed is None else seed
    gpus = () if cpu else _visible(_detected(driver := Driver()))
    if not cpu:
        driver.close()  # the trainings ask it themselves
    most = min(shards, len(gpus) or 4)
    device = (
        ["--gpus", "{processes}"] if gpus else ["--device", "cpu", "--processes", "{processes}"]
    )
    click.echo(
        f"drill on up to {most} {'GPUs' if gpus else 'CPU processes'}, {steps} steps of "
        f"{shards} shards, --seed {seed}"
    )
    for task in tasks or ("digits", "digits_augmented"):
        # moments, no secrets
        for line in drill_task(task, shards, steps, device, most, random.Random(seed)):  # noqa: S311
            click.echo(line)


@cli.command(
    context_settings=_PASS_ON | _PAGE,
    options_metavar="[OPTIONS]",
    short_help="Measure the training speed by GPUs, batch size and workers.",
)
@click.option(
    "--gpus",
    "counts",
    type=Numbers(1),
    envvar="GPUS",
    help="How many GPUs. Default: 1, 2, 4 ... and all visible.",
)
@click.option(
    "--processes",
    type=Numbers(1),
    envvar="PROCESSES",
    help="How many CPU processes. Default without GPUs: 1, 2 ... up to 4.",
)
@click.option(
    "--device",
    type=click.Choice(["auto", "cuda", "cpu"]),
    envvar=["DEVICE", "TRAINBOX_DEVICE"],
    help="Default: auto.",
)
@click.option(
    "--strategies",
    metavar="ddp,dp",
    default="ddp",
    envvar="STRATEGY",
    help="On several GPUs. Default: ddp.",
)
@click.option(
    "--batch-size",
    "batch_sizes",
    type=Numbers(1),
    envvar="TRAINBOX_BATCH_SIZE",
    help="Of a step (strong scaling), and of each GPU (weak). Default: the task's, and no "
    "weak scaling.",
)
@click.option(
    "--workers",
    type=Numbers(0),
    envvar="TRAINBOX_WORKERS",
    help="Loader processes a process. Default: as train.",
)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=3,
    metavar="N",
    help="Times that each case is measured. Default: 3.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(0.1, 3600),
    default=10.0,
    metavar="S",
    help="Measured of each, after a warm-up. Default: 10.",
)
@click.option(
    "--suggest",
    is_flag=True,
    help="Go on to larger batches and more workers while they pay; say which do, and why.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Also write bench.md, bench.json, bench.svg there.",
)
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="TASK")
def bench(
    words: tuple[str, ...],
    counts: tuple[int, ...] | None,
    processes: tuple[int, ...] | None,
    device: str | None,
    strategies: str,
    batch_sizes: tuple[int, ...] | None,
    workers: tuple[int, ...] | None,
    rounds: int,
    seconds: float,
    suggest: bool,
    out: Path | None,
) -> None:
    """Measure how fast TASK trains on 1, 2, 4 ...

    GPUs, by batch size and workers, and print the tables.

    Each case is a real `trainbox train`, in rounds that take turns. Options of `train` that are not
    below hold for all.

    \b
    Examples:
      trainbox bench mnist --gpus 1,2,4 --strategies dp,ddp --batch-size 64,128
      trainbox bench mnist --gpus 1,2 --set in_memory=false --workers 0,4,8 --suggest
      trainbox bench digits --processes 1,2 --device cpu --out tables
    """
    from entrypoint.bench import tables
    from entrypoint.bench.runs import Bench, NoCase, prepare_folder, write_files
    from entrypoint.bench.suggest import further, suggestions

    tables.check_words(words)
    cpu, asked = _bench_counts(counts, processes, device)
    named = tables.check_strategies(strategies, cpu)
    table = tables.lines(asked, named, batch_sizes or (None,), workers or (None,))
    if out is not None:
        prepare_folder(out)
    unit = "process" if cpu else "GPU"
    cpus = usable_cpus()
    chosen = tables.with_choices(words, os.environ, cpu, max(1, cpus // max(asked)))
    runs = Bench(
        tables.cases(table),
        lambda case, folder: tables.training_words(case, chosen, cpu, folder, seconds),
        lambda case: tables.describe(case, unit),
    )
    runs.run(rounds, (lambda outcomes: further(outcomes, rounds, cpus)) if suggest else None)
    found = tables.rows(tables.with_others(table, runs.outcomes), runs.outcomes)
    advice = suggestions(runs.outcomes, unit, rounds, cpus) if suggest else []
    outside = [f"{name}={os.environ[name]}" for name in ("TASK", "SET") if os.environ.get(name)]
    facts = {
        "command": shlex.join([*outside, "trainbox", *sys.argv[1:]]),
        "unit": unit,
        "rounds": rounds,
        "seconds": seconds,
        **runs.facts,
    }
    text = tables.markdown(found, facts, advice)
    click.echo(text)
    if out is not None:
        write_files(out, text, tables.as_json(found, runs.outcomes, facts, advice))
    if runs.stopped_by:
        message(f"{runs.stopped_by} received: the tables have what was measured before it")
        sys.exit(PREEMPTED)
    failed = [outcome for outcome in runs.outcomes.values() if outcome.failure]
    if len(failed) == len(runs.outcomes):
        raise NoCase(failed[0].exit_code, f"bench: no case was measured: {failed[0].failure}")


def _bench_counts(
    counts: tuple[int, ...] | None, processes: tuple[int, ...] | None, device: str | None
) -> tuple[bool, tuple[int, ...]]:
    """Whether on the CPU, and the numbers of GPUs or processes."""
    from entrypoint.bench.tables import doubling

    if counts and (processes or device == "cpu"):
        raise InvalidRequest(
            "--gpus and the CPU (--processes, --device cpu) contradict each other: drop one of them"
        )
    if processes and device == "cuda":
        raise InvalidRequest(
            "--processes is for CPU runs, and --device cuda is asked: drop one of them"
        )
    if counts:
        return False, counts
    found = 0
    if not processes and device != "cpu":
        found = len(_visible(_detected(driver := Driver())))
        driver.close()  # the trainings ask it themselves
        if device == "cuda" and not found:
            raise HardwareMissing(
                "--device cuda asked, no GPU found: run on a GPU host with its driver, or "
                "use --device cpu"
            )
    return found == 0, processes or doubling(found or min(4, usable_cpus()))


@cli.command(context_settings=_PASS_ON, short_help="List the tasks, or the fields of one task.")
@click.argument("rest", nargs=-1, type=click.UNPROCESSED)
def tasks(rest: tuple[str, ...]) -> None:
    """List the tasks, or one task's fields: `trainbox tasks mnist`."""
    _hand_over("tasks", *rest)


def _supervised(plan: LaunchPlan, checked: Checked, resumes: bool = True) -> NoReturn:
    # Python orders a set of texts by a number that it draws at each start, unless it is told one.
    env = {"PYTHONHASHSEED": "0", **os.environ, **plan.env}
    from entrypoint.system.temporary import temporary_folder

    with contextlib.ExitStack() as stack:
        # The trainer makes this file when it has finished: an exit code of 0 alone does not show
        # that.
        finished = stack.enter_context(temporary_folder("run-")) / "finished"
        env["TRAINBOX_FINISHED"] = str(finished)
        watch = None
        if checked.driver is not None and checked.health and plan.gpus:
            from entrypoint.health.gate import watched

            watch = stack.enter_context(watched(plan, checked.driver, checked.health_limits))
            env["TRAINBOX_HEALTH_EVENTS"] = str(watch.events)
        elif checked.driver is not None:
            checked.driver.close()
        code = supervise(plan.argv, env, watch=watch, resumes=resumes)
        if code == 0 and not finished.exists():
            message(
                "the training exited with code 0 before it was finished: "
                "does the task call os._exit?"
            )
            code = 1
    sys.exit(code)


def _hand_over(*words: str) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, command_of("trainer", *words))


def _planned_launch(request: LaunchRequest, gpus: tuple[Gpu, ...]) -> LaunchPlan:
    return plan_launch(request, gpus, detect_cluster(os.environ))


def _checked_plan(
    training: tuple[str, ...],
    options: dict[str, Any],
    verb: str = "train",
    decide: Callable[[LaunchRequest, tuple[Gpu, ...]], LaunchPlan] = _planned_launch,
) -> tuple[LaunchPlan, Checked]:
    """The plan, while a child checks the trainer's words without torch; of two mistakes the
    trainer's is told.
    """
    checked = Checked(options.pop("health"), options.pop("health_limits"))
    if checked.health_limits:
        from entrypoint.health.limits import read_limits

        # report a wrong file before the GPUs are examined
        read_limits(checked.health_limits)
    checking = subprocess.Popen(
        command_of("trainer", verb, "--check", "--device-on-stdin", *training),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    decided = ""
    try:
        plan = _plan((verb, *training), options, decide, checked)
        decided = f"{plan.env['TRAINBOX_DEVICE']}\n{plan.strategy}"
    finally:
        printed, _ = checking.communicate(decided + "\n")
        if checking.returncode:
            sys.exit(checking.returncode)
    # The last line names what the environment has set, unless a task that was loaded for the check
    # has printed another.
    reported = [name for name in "".join(printed.splitlines()[-1:]).split() if name in os.environ]
    names = [*environment_names(click.get_current_context()), *reported]
    if names:
        plan = dataclasses.replace(
            plan, env={**plan.env, "TRAINBOX_SETTINGS": _from_environment(names)}
        )
    return plan, checked


def _from_environment(names: Sequence[str]) -> str:
    """`device cpu (from DEVICE), ...`: a variable that somebody has forgotten would change a run in
    silence.
    """
    from entrypoint.doctor.redaction import shown_setting  # its patterns take 3 ms to compile

    settings = [(name, name.removeprefix("TRAINBOX_").lower().replace("_", "-")) for name in names]
    return ", ".join(
        f"{' '.join([label, shown_setting(name, os.environ[name])]).strip()} (from {name})"
        for name, label in settings
    )


def _plan(
    words: tuple[str, ...],
    options: dict[str, Any],
    decide: Callable[[LaunchRequest, tuple[Gpu, ...]], LaunchPlan],
    checked: Checked,
) -> LaunchPlan:
    options["device"] = _device(options["device"], options["processes"])
    threads = os.environ.get("OMP_NUM_THREADS", "")
    request = LaunchRequest(
        argv=("trainer", *words),
        python=sys.executable,
        cpus=usable_cpus(),
        omp_num_threads=int(threads) if threads.isdecimal() and int(threads) > 0 else None,
        **options,
    )
    # A CPU run asked for does not look at the driver at all: it works beside a broken one.
    if request.device in ("cpu", "mps") or request.gpus == 0:
        return decide(request, ())
    checked.driver = Driver()
    return decide(request, _visible(_detected(checked.driver)))


def _device(asked: str | None, processes: int | None) -> str | None:
    if asked not in (None, "auto"):
        return asked
    return (
        "mps"
        if (sys.platform, platform.machine()) == ("darwin", "arm64") and processes is None
        else None
    )


def _detected(driver: Driver) -> "Detection":
    try:
        found = driver.detect()
    except NoAnswer as error:
        raise HardwareMissing(
            f"{error}: see `nvidia-smi` on the host, or reboot it; {_ALL_THE_SAME}"
        ) from error
    if found.broken:
        raise HardwareMissing(f"{found.broken}; {_ALL_THE_SAME}")
    return found


def _visible(found: "Detection") -> tuple[Gpu, ...]:
    return visible_gpus(found.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


def _run_verbatim(argv: list[str]) -> NoReturn:
    try:
        os.execvp(argv[0], argv)
    except (OSError, ValueError) as error:  # ValueError: an empty word
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
    """The console script and the image's entrypoint."""
    open_streams()
    words = sys.argv[1:]
    try:
        if words and not words[0].startswith("-") and words[0] not in cli.commands:
            _run_verbatim(words)
        check_packages(sys.path)
        _drop_ranks()
        sys.exit(cli.main(words or ["--help"], prog_name="trainbox", standalone_mode=False) or 0)
    except click.ClickException as error:
        message(error.format_message())
        sys.exit(WRONG_USE)
    except LaunchError as error:
        message(str(error))
        sys.exit(error.exit_code)
    except click.Abort:
        sys.exit(130)
