"""`trainbox drill`: trainings that are killed and must have the same result."""

import os
from collections.abc import Sequence
from pathlib import Path

from entrypoint.cli.run import find_target
from entrypoint.cli.training import gpus_for_trainings, parsed_training
from entrypoint.cli.verb import ScriptCommand, verb
from trainbox.disclosure.suggested_commands import from_here
from trainbox.errors import WrongUse
from trainbox.folders.write_failures import show


@verb("drill")
def drill(
    tasks: tuple[str, ...],
    shards: int,
    steps: int,
    seed: int | None,
    gpus: int | str | None,
    gpu_ids: str | None,
    device: str | None,
    processes: int | None,
) -> None:
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

    tasks = tasks or ("digits", "digits_augmented")
    for task in tasks:
        parsed_training("drill", [task])  # a mistake needs no training
    seed = _drawn(seed)
    count = gpus_for_trainings(gpus, gpu_ids, device, on_cpu=bool(processes))
    most = min(shards, count or processes or 4)
    show(f"drill on up to {most} {_unit(count)}, {steps} steps of {shards} shards, --seed {seed}")
    for task in tasks:
        # The random numbers select the steps of the kills. They are not secrets.
        draw = random.Random(seed)  # noqa: S311
        for line in drill_task(task, shards, steps, _device(count), most, draw):
            show(line)


@verb(
    "drill run",
    ScriptCommand,
    example="drill run train.py --compare last.pt -- --epochs 3",
    options_metavar="--compare FILE [OPTIONS]",
)
def drill_run(
    arguments: tuple[str, ...],
    file: str,
    counts: tuple[int, ...] | None,
    kills: int,
    tolerance: float,
    ignored: tuple[str, ...],
    on_resume: str | None,
    seed: int | None,
    torchrun: bool | None,
    module: str | None,
    gpus: int | str | None,
    gpu_ids: str | None,
    device: str | None,
) -> None:
    """Check that SCRIPT resumes: train it undisturbed and with kills, and compare FILE.

    Each training is a `trainbox run` with a run folder of its own. The first one is not disturbed.
    The others are killed at random moments by SIGKILL, or by SIGTERM, at which the script can save,
    and started again by the same command. FILE must then be the same. With several --processes,
    trainings also resume on other numbers of processes.

    If FILE differs, the exit code is 8. The message names the first tensor that differs. If nothing
    shows that the script has resumed, the exit code is 8 as well.

    \b
    Examples:
      trainbox drill run train.py --compare model.safetensors -- --epochs 3 --out {run}
      trainbox drill run train.py --compare last.pt --processes 2 --kills 3
      trainbox drill run train.py --compare metrics.csv --processes 1,2 --tolerance 1e-5
    """
    import random

    from entrypoint.drill.compare_files import check_file
    from entrypoint.drill.script_drill import DrillRequest, drill_script

    file = os.path.normpath(file.removeprefix("{run}/"))
    check_file(file)
    if not module and not arguments:
        raise WrongUse("drill run needs a script, as in drill run train.py --compare last.pt")
    target = find_target(module, list(arguments[:1]))  # a mistake needs no training
    if not module:
        # A training runs in a copy of the current folder.
        arguments = (from_here(Path(arguments[0])), *arguments[1:])
    script = ("-m", module, "--", *arguments) if module else (*arguments[:1], "--", *arguments[1:])
    used = gpus_for_trainings(gpus, gpu_ids, device, of_our_torch=target.has_our_python)
    if counts and torchrun is False:
        raise WrongUse("--no-torchrun and --processes contradict each other: drop one")
    if used and max(counts or (1,)) > used:
        raise WrongUse(
            f"--processes {max(counts or (1,))} needs as many GPUs, and {used} are used: use "
            "fewer, or --gpus 0 for the CPU"
        )
    options = [] if torchrun is None else ["--torchrun" if torchrun else "--no-torchrun"]
    options += [] if on_resume is None else ["--on-resume", on_resume]
    if torchrun is False and used:
        counts, where = (1,), f"one process with {used} GPUs"
    elif used or counts:
        counts = counts or (used,)
        options += _device(used)
        unit = _unit(used) if max(counts) > 1 else "GPU" if used else "CPU process"
        where = f"{', '.join(map(str, counts))} {unit}"
    else:
        counts, where = (1,), "one CPU process"
        options += ["--device", "cpu"]
    seed = _drawn(seed)
    show(f"drill of {module or arguments[0]} on {where}, --kills {kills} --seed {seed}")
    request = DrillRequest(script, tuple(options), file, counts, kills, tolerance, ignored)
    # The random numbers select the moments of the kills. They are not secrets.
    for line in drill_script(request, random.Random(seed)):  # noqa: S311
        show(line)


def _drawn(seed: int | None) -> int:
    import secrets  # loads OpenSSL, which takes milliseconds

    return secrets.randbelow(10**6) if seed is None else seed


def _unit(gpus: int) -> str:
    return "GPUs" if gpus else "CPU processes"


def _device(gpus: int) -> Sequence[str]:
    """Return the options of a training on a number of GPUs or processes."""
    return ["--gpus", "{processes}"] if gpus else ["--device", "cpu", "--processes", "{processes}"]
