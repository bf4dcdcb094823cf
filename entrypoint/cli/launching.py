"""Supervise the process of a launch plan that the trainer runs in."""

import contextlib
import os
import sys
from typing import TYPE_CHECKING, NoReturn

from entrypoint.launch.supervise import TRAINING, Child, supervise
from trainbox.contract.errors import ExitCode
from trainbox.contract.streams import message

if TYPE_CHECKING:
    from entrypoint.cli.planning import Checked
    from entrypoint.launch.plan import LaunchPlan


def supervised(plan: "LaunchPlan", checked: "Checked", kind: Child = TRAINING) -> NoReturn:
    """Run the process of `plan`, watch its GPUs, and exit with its exit code.

    If the process exits with code 0 before the trainer has finished, the exit code is 1.
    """
    # Without a fixed hash seed, Python orders sets of strings differently at each start.
    env = {"PYTHONHASHSEED": "0", **os.environ, **plan.env}
    from trainbox.contract.temporary import temporary_folder

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
                f"{kind.name} exited with code 0 before it was finished: does the user's code call "
                "os._exit?"
            )
            code = ExitCode.UNEXPECTED
    sys.exit(code)
