"""The command `train`: check the arguments without torch, then run a session."""

import os
import sys
from pathlib import Path
from typing import Any

import click

from trainbox.contract.config import Config, check
from trainer.cli.invocation import (
    Verb,
    check_run_name,
    read_device,
    report_environment,
    task_fields,
    warn_of_overruled_imports,
    without_replaced,
)
from trainer.cli.option_help import help_options
from trainer.cli.options import training_options
from trainer.cli.parameters import COUNT, STORAGE, Number, make_option
from trainer.parallel.strategy import STRATEGIES
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
@make_option(
    "--mirror",
    section=STORAGE,
    metavar="URL",
    help="Object storage for copies of the checkpoints, such as s3://bucket/prefix; a run whose "
    "folder is lost resumes from there.",
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
    mirror: str | None,
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
    if mirror:
        from trainer.records.mirror_storage import check_url

        check_url(mirror)
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
        mirror=mirror or None,  # an empty URL overrides that of the environment
    )
