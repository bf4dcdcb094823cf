"""Make the launch plan of a verb that the trainer runs, and check the trainer's options."""

import dataclasses
import os
import sys
from typing import TYPE_CHECKING, Any

import click

from entrypoint.cli.options import environment_names
from entrypoint.system.forks import ForkedModule

if TYPE_CHECKING:
    from collections.abc import Callable

    from entrypoint.cli.planning import Checked
    from entrypoint.driver.gpus import Gpu
    from entrypoint.launch.plan import LaunchPlan
    from entrypoint.launch.request import LaunchRequest


def checked_plan(
    training: tuple[str, ...],
    options: dict[str, Any],
    verb: str = "train",
    decide: "Callable[[LaunchRequest, tuple[Gpu, ...]], LaunchPlan] | None" = None,
) -> "tuple[LaunchPlan, Checked]":
    """Build the launch plan while a fork validates the training options without torch.

    If both fail, report the training options' error. Without `decide`, plan one training.
    """
    checking = ForkedModule("trainer", verb, "--check", "--device-on-stdin", *training)
    decided = ""
    try:
        # Imported while the fork imports the trainer, which takes as long.
        from entrypoint.cli.planning import Checked, make_plan, plan_training, settings_text

        checked = Checked.take_from(options)
        argv = ("trainer", verb, *training)
        plan = make_plan(argv, options, decide or plan_training, checked)
        decided = f"{plan.env['TRAINBOX_DEVICE']}\n{plan.strategy}"
    finally:
        printed = checking.communicate(decided + "\n")
        if checking.returncode:
            sys.exit(checking.returncode)
    # The last line names the settings from the environment, and with an experiment's file those of
    # the command line, unless a task that was loaded for the check printed another.
    reported = "".join(printed.splitlines()[-1:]).split()
    ctx = click.get_current_context()
    names = [*environment_names(ctx), *(name for name in reported if name in os.environ)]
    settings, recorded = [settings_text(names)] if names else [], {}
    if "experiment" in ctx.meta:
        from entrypoint.cli.experiment import origin, record

        settings = [origin(ctx, [name for name in reported if name[:2] == "--"]), *settings]
        recorded = record(ctx)
    if settings:
        env = {**plan.env, "TRAINBOX_SETTINGS": "; ".join(settings), **recorded}
        plan = dataclasses.replace(plan, env=env)
    return plan, checked
