"""Hand verbs over to the trainer: check their options, make the plan, and supervise the process."""

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import click

from entrypoint.cli.options import environment_names
from entrypoint.cli.planning import Checked, make_plan, settings_text
from entrypoint.driver.gpus import Gpu
from entrypoint.launch.cluster import detect_cluster
from entrypoint.launch.plan import LaunchPlan, plan_launch
from entrypoint.launch.request import LaunchRequest
from entrypoint.launch.supervise import TRAINING, Child, supervise
from entrypoint.system.commands import command_of
from entrypoint.system.forks import ForkedModule
from entrypoint.system.streams import message


def supervised(plan: LaunchPlan, checked: Checked, kind: Child = TRAINING) -> NoReturn:
    # Without a fixed hash seed, Python orders sets of strings differently at each start.
    env = {"PYTHONHASHSEED": "0", **os.environ, **plan.env}
    from entrypoint.system.temporary import temporary_folder

    with contextlib.ExitStack() as stack:
        # The trainer creates this file when it has finished. An exit code of 0 is not proof.
        finished = stack.enter_context(temporary_folder("run-")) / "finished"
        env["TRAINBOX_FINISHED"] = str(finished)
        watch = None
        if opened := checked.watch(plan):
            watch = stack.enter_context(opened())
            env["TRAINBOX_HEALTH_EVENTS"] = str(watch.events)
        code = supervise(plan.argv, env, watch=watch, kind=kind).code
        if code == 0 and not finished.exists():
            message(
                "the training exited with code 0 before it was finished: "
                "does the task call os._exit?"
            )
            code = 1
    sys.exit(code)


def hand_over(*arguments: str) -> NoReturn:
    sys.stdout.flush()
    os.execv(sys.executable, command_of("trainer", *arguments))


def planned_launch(request: LaunchRequest, gpus: tuple[Gpu, ...]) -> LaunchPlan:
    return plan_launch(request, gpus, detect_cluster(os.environ))


def checked_plan(
    training: tuple[str, ...],
    options: dict[str, Any],
    verb: str = "train",
    decide: Callable[[LaunchRequest, tuple[Gpu, ...]], LaunchPlan] = planned_launch,
) -> tuple[LaunchPlan, Checked]:
    """Build the launch plan while a fork validates the training options without torch.

    If both fail, report the training options' error.
    """
    checked = Checked.take_from(options)
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
