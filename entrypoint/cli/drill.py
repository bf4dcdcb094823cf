"""`trainbox drill`: trainings that are killed and must have the same result."""

from collections.abc import Sequence

import click

from entrypoint.cli.options import MOST_PROCESSES, PAGE, Numbers
from entrypoint.cli.run import find_target
from entrypoint.driver.process import count_visible
from trainbox.contract.errors import WrongUse

_SEED = click.option(
    "--seed",
    type=click.IntRange(0),
    metavar="N",
    help="Seed of the random kills. Default: random.",
)
_CPU = click.option("--cpu", is_flag=True, help="Train on CPU processes even if there are GPUs.")


@click.command(options_metavar="[OPTIONS]")
@click.argument("tasks", nargs=-1, envvar="TASK")
@click.option(
    "--shards",
    type=click.IntRange(1),
    default=4,
    metavar="V",
    help="Shards of a batch. Default: 4.",
)
@click.option(
    "--steps",
    type=click.IntRange(10),
    default=60,
    metavar="N",
    help="Length of each training. Default: 60.",
)
@_SEED
@_CPU
def drill(tasks: tuple[str, ...], shards: int, steps: int, seed: int | None, cpu: bool) -> None:
    """Check that TASKS (default: digits and digits_augmented) train to the same bits through kills.

    Each task is trained on 1 to V processes (or GPUs), then killed at random steps and resumed on
    other numbers of processes. Set training options in the environment:
    TRAINBOX_BATCH_SIZE=256 trainbox drill my.py:Gestures

    `trainbox drill run SCRIPT --compare FILE` checks a script of your own.

    \b
    Examples:
      trainbox drill
      trainbox drill my_tasks/gestures.py:Gestures --steps 200
      trainbox drill run --help
    """
    import random

    from entrypoint.drill.task import drill_task  # takes 6 ms

    seed = _drawn(seed)
    gpus = 0 if cpu else count_visible()
    largest = min(shards, gpus or 4)
    click.echo(
        f"drill on up to {largest} {_unit(gpus)}, {steps} steps of {shards} shards, --seed {seed}"
    )
    for task in tasks or ("digits", "digits_augmented"):
        # The random numbers select the steps of the kills. They are not secrets.
        draw = random.Random(seed)  # noqa: S311
        for line in drill_task(task, shards, steps, _device(gpus), largest, draw):
            click.echo(line)


class _OfScript(click.Command):
    """A command whose unknown options were probably meant for the script."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            raise WrongUse(
                f"no such option {error.option_name}: the arguments of the script follow --, as in "
                "drill run train.py --compare last.pt -- --epochs 3"
            ) from error


@click.command(cls=_OfScript, context_settings=PAGE, options_metavar="--compare FILE [OPTIONS]")
@click.option(
    "--compare",
    "file",
    required=True,
    metavar="FILE",
    help="File in the run folder with the result: .safetensors, .pt, .npz, .csv, .json.",
)
@click.option(
    "--processes",
    "counts",
    type=Numbers(1),
    help="Numbers of GPUs or CPU processes. Default: all visible GPUs, or 1 process.",
)
@click.option(
    "--kills",
    type=click.IntRange(1, 100),
    default=2,
    metavar="N",
    help="Kills of each training, by SIGKILL and SIGTERM in turn. Default: 2.",
)
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1),
    default=0.0,
    metavar="T",
    help="Accept floats with |a - b| <= T * max(1, |a|). Default: 0, the same bits.",
)
@_SEED
@_CPU
@click.option(
    "--one-process",
    is_flag=True,
    help="Start one process without torchrun, as `trainbox run --one-process` does.",
)
@click.option("-m", "--module", metavar="MODULE", help="Train with a module instead of a script.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="SCRIPT [-- ARGS]")
def drill_run(
    arguments: tuple[str, ...],
    file: str,
    counts: tuple[int, ...] | None,
    kills: int,
    tolerance: float,
    seed: int | None,
    cpu: bool,
    one_process: bool,
    module: str | None,
) -> None:
    """Check that SCRIPT resumes: train it undisturbed and with kills, and compare FILE.

    Each training is a `trainbox run` with a run folder of its own. The first one is not disturbed.
    The others are killed at random moments by SIGKILL, or by SIGTERM, at which the script can save,
    and started again by the same command. FILE must then be the same. With several --processes,
    trainings also resume on other numbers of processes.

    If FILE differs, the exit code is 8. The message names the first tensor that differs.

    \b
    Examples:
      trainbox drill run train.py --compare model.safetensors -- --epochs 3 --out {run}
      trainbox drill run train.py --compare last.pt --processes 2 --kills 3
      trainbox drill run train.py --compare metrics.csv --processes 1,2 --tolerance 1e-5
    """
    import random

    from entrypoint.drill.compare import check_file
    from entrypoint.drill.script import DrillRequest, drill_script

    check_file(file)
    if not module and not arguments:
        raise WrongUse("drill run needs a script, as in drill run train.py --compare last.pt")
    find_target(module, list(arguments[:1]))  # a mistake in the name needs no training
    script = ("-m", module, "--", *arguments) if module else (*arguments[:1], "--", *arguments[1:])
    gpus = 0 if cpu else count_visible()
    if counts and one_process:
        raise WrongUse("--one-process and --processes contradict each other: drop one")
    if max(counts or (1,)) > (gpus or MOST_PROCESSES):
        raise WrongUse(
            f"--processes {max(counts or (1,))} needs as many GPUs, and {gpus} are visible: use "
            "fewer, or --cpu"
        )
    if one_process:
        counts, device = (1,), ["--one-process", *([] if gpus else ["--device", "cpu"])]
        where = f"one process with {gpus} GPUs" if gpus else "one CPU process"
    else:
        counts, device = counts or (gpus or 1,), [*_device(gpus)]
        unit = _unit(gpus) if max(counts) > 1 else "GPU" if gpus else "CPU process"
        where = f"{', '.join(map(str, counts))} {unit}"
    seed = _drawn(seed)
    click.echo(f"drill of {module or arguments[0]} on {where}, --kills {kills} --seed {seed}")
    request = DrillRequest(script, tuple(device), file, counts, kills, tolerance)
    # The random numbers select the moments of the kills. They are not secrets.
    for line in drill_script(request, random.Random(seed)):  # noqa: S311
        click.echo(line)


def _drawn(seed: int | None) -> int:
    import secrets  # loads OpenSSL, which takes milliseconds

    return secrets.randbelow(10**6) if seed is None else seed


def _unit(gpus: int) -> str:
    return "GPUs" if gpus else "CPU processes"


def _device(gpus: int) -> Sequence[str]:
    """Return the options of a training on a number of GPUs or processes."""
    return ["--gpus", "{processes}"] if gpus else ["--device", "cpu", "--processes", "{processes}"]
