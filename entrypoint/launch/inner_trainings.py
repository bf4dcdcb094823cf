"""Start `trainbox` from a command of `trainbox`: the trainings of a drill and of a bench."""

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from trainbox.disclosure.variables import HEALTH_NAMES, without_launch
from trainbox.processes.process_tree import start_child
from trainbox.processes.programs import ENTRYPOINT, command_of

Process = subprocess.Popen[bytes]

# The settings that contradict the arguments of such a training.
_REPLACED = ("TRAINBOX_EPOCHS", "TRAINBOX_RESUME")


def start(arguments: Sequence[str], log: Path, work: Path | None = None) -> Process:
    """Start `trainbox` with `arguments`, and write its output to `log`.

    Its current folder is `work`, if this folder exists. Its input is empty, as only one start could
    read ours.
    """
    here = {"PWD": str(work)} if work and work.is_dir() else {}
    with log.open("w", encoding="utf-8") as output:
        return start_child(
            command_of(ENTRYPOINT, *arguments),
            env=environment(os.environ) | here,
            cwd=here.get("PWD"),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            # For `kill_tree`, and so that a terminal's Ctrl-C reaches only our own process.
            start_new_session=True,
        )


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a training: the user's, without what sets up a launch.

    The user's settings of the health check apply to each training, as does the task.
    """
    kept = {name: env[name] for name in (*HEALTH_NAMES, "TASK") if name in env}
    given = without_launch(env) | kept
    return {name: value for name, value in given.items() if name not in _REPLACED}
