"""The commands `train` and `verify`: check the arguments without torch, then run a session."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from trainer.cli.invocation import (
    Verb,
    check_run_name,
    read_device,
    report_environment,
    task_fields,
    warn_of_overruled_imports,
    without_replaced,
)
from trainer.cli.options import help_options, training_options, verification_options
from trainer.cli.parameters import COUNT, STORAGE, Number, make_option
from trainer.errors import WrongUse
from trainer.parallel.strategy import STRATEGIES
from trainer.settings.config import Config, check
from trainer.system.signals import StopRequest


@click.command(cls=Verb)
@click.argument("task", envvar="TASK", default="digits")
@training_options
@make_option(
    "--profile",
    section=STORAGE,
    type=COUNT,
    metavar="N",
    help="Profile N steps: write profile.json, and print the ten longest operators.",
)
@click.option("--measure-seconds", type=Number(0), hidden=True)  # for `trainbox bench`
@help_options()
def train(
    task: str,
    pairs: tuple[str, ...],
    runs_dir: Path,
    run: str | None,
    data_dir: Path,
    resume: str,
    device: str,
    only_check: bool,
    device_on_stdin: bool,
    profile: int | None,
    measure_seconds: float | None,
    **settings: Any,
) -> None:
    """Train TASK: a built-in name, file.py:Class or module:Class.

    \b
    Examples:
      trainbox train digits --epochs 5 --device cpu
      trainbox train my.py:Gestures --set width=64
    """
    device = read_device(device, device_on_stdin)
    config = Config(task=task, fields=task_fields(task, pairs), **without_replaced(settings))
    check(config, device)
    # The launcher chooses the strategy after the device.
    if device_on_stdin and (strategy := sys.stdin.readline().strip()):
        STRATEGIES[strategy].check(config)
    check_run_name(run)
    if only_check:
        warn_of_overruled_imports(task)
        report_environment()
        return
    stop = StopRequest.install()
    if profile is not None:
        # The library of torch's profiler reads this when it is loaded, and prints its phases else.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    from trainer.session.train import train_task

    train_task(
        config,
        stop,
        device,
        runs_dir,
        run,
        data_dir,
        resume,
        measure_s=measure_seconds,
        profile_steps=profile,
    )


@click.command(cls=Verb)
@click.argument("run", type=click.Path(path_type=Path))
@click.argument("other", required=False, type=click.Path(path_type=Path))
@click.option(
    "--steps", type=COUNT, metavar="N", help="Repeat the first N steps. Default: the whole run."
)
@verification_options
def verify(
    run: Path,
    other: Path | None,
    steps: int | None,
    data_dir: Path,
    device: str,
    only_check: bool,
    device_on_stdin: bool,
) -> None:
    """Repeat RUN and compare the digests, or compare RUN with the run OTHER without training.

    If they differ, the exit code is 8. The message names the first recorded step and the first
    tensor that differ.

    \b
    Examples:
      trainbox verify runs/digits-7d2c1a90
      trainbox verify runs/digits-7d2c1a90 --steps 100
      trainbox verify runs/digits-7d2c1a90 runs/digits-7d2c1a90-replay
    """
    if other is not None:
        _compare(run, other)
        return
    device = read_device(device, device_on_stdin)
    for name in ("config.json", "manifest.json", "digests.jsonl"):
        if not (run / name).is_file():
            raise WrongUse(
                f"verify {run}: {name} is missing: give the folder of a run, such as "
                "runs/digits-7d2c1a90"
            )
    if only_check:
        report_environment()
        return
    stop = StopRequest.install()
    from trainer.session.verify import verify_run

    verify_run(run, steps, stop, device, data_dir)


def _compare(one: Path, other: Path) -> None:
    """Print that two runs have the same bits, with their differences in settings.

    Raises:
        WrongUse: A folder is not a run, or both are the same folder.
        Differs: The digests differ, or a run's files contradict each other.
    """
    from trainer.records.compare import (  # their patterns take milliseconds to compile
        listed_changes,
        manifest_differences,
    )
    from trainer.records.evidence import Evidence, verdict

    for run in (one, other):
        for name in ("digests.jsonl", "manifest.json"):
            if not (run / name).is_file():
                raise WrongUse(f"verify {run}: {name} is missing: give the folders of two runs")
    if one.samefile(other):
        raise WrongUse(
            f"verify {one} {other}: both are the same folder: give the folders of two runs"
        )
    runs = [Evidence.of(run) for run in (one, other)]
    from trainer.records.shipped import check_files

    a, b = (check_files(run) for run in runs)
    same = verdict(a, b, listed_changes(manifest_differences(a.manifest, b.manifest)))
    # Entries have a time: equal files are copies, not two trainings.
    copied = bool(a.metrics) and a.metrics == b.metrics
    note = f"; {other} is a copy of {one}: this is one training, compared with itself"
    click.echo(same + (note if copied else ""))
