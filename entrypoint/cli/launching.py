"""Run the trainer: under supervision by a launch plan, or instead of this process."""

import contextlib
import os
import sys
from typing import Any, NoReturn

from entrypoint.cli.planning import Launch
from entrypoint.launch.children import Child
from entrypoint.launch.supervise import supervise
from trainbox.files.temporary import temporary_folder
from trainbox.options.table import arguments
from trainbox.processes.environment import Internal
from trainbox.processes.programs import TRAINER, command_of
from trainbox.processes.streams import message


def supervised(launch: Launch, kind: Child) -> NoReturn:
    """Run the process of the plan, watch its GPUs, and exit with its exit code.

    If the process exits with code 0 before the trainer has finished, the exit code is 1.
    """
    env = {**os.environ, **launch.plan.env}
    with contextlib.ExitStack() as stack:
        # The trainer creates this file when it has finished. An exit code of 0 is not proof.
        finished = stack.enter_context(temporary_folder("run-")) / "finished"
        env[Internal.FINISHED] = str(finished)
        watch = None
        if opened := launch.watch():
            watch = stack.enter_context(opened())
            env[Internal.HEALTH_EVENTS] = str(watch.events)
        code = supervise(launch.plan.argv, env, watch=watch, kind=kind).code
        if code == 0 and not finished.exists():
            message(
                f"{kind.name} exited with code 0 before it was finished: does the user's code "
                "call os._exit?"
            )
            code = 1
    sys.exit(code)


def become_trainer(command: str, values: dict[str, Any]) -> NoReturn:
    """Run a command of the trainer, which needs no plan, instead of this process."""
    argv = command_of(TRAINER, *arguments(command, values))
    sys.stdout.flush()
    os.execve(argv[0], argv, os.environ)
