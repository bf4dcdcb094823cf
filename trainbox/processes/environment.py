"""What processes of Trainbox pass to each other in the environment.

At its start, `trainbox` puts its sys.path into PYTHONPATH, where the user's folders are last. Each
process of Trainbox inherits this, so no module of a user replaces ours. Programs and tasks of a
user see the user's PYTHONPATH again.
"""

import enum
import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass


class Internal(enum.StrEnum):
    """The name of each internal variable. A test finds a name that is missing here."""

    AGENT = "TRAINBOX_AGENT"  # the process that starts the ranks of a machine
    FINISHED = "TRAINBOX_FINISHED"  # the file that the trainer creates when it has finished
    HEALTH_EVENTS = "TRAINBOX_HEALTH_EVENTS"  # the file with the events of the launch's GPUs
    LAUNCH = "TRAINBOX_LAUNCH"  # what the trainer needs of the launch plan: `LaunchFacts`
    MESSAGES = "TRAINBOX_MESSAGES"  # the folder for the last message of each rank
    PIPES = "TRAINBOX_PIPES"  # the folder of the pipes that take the output of a script's ranks
    PYTHONPATH = "TRAINBOX_PYTHONPATH"  # the user's PYTHONPATH, in our own processes
    STORE = "TRAINBOX_STORE"  # the file through which a machine's ranks connect


_USERS = Internal.PYTHONPATH
_SEARCHED = os.pathsep.join(sys.path)  # before the code of a task can change it


@dataclass(frozen=True)
class LaunchFacts:
    """What the launch plan has decided. The defaults are for a trainer without a plan.

    Attributes:
        reason: the plan in one line.
        settings: where the settings come from that are not on the command line, to be shown.
        config_file: the `name` and the `sha256` of the experiment's file.
        cpus: the number of CPUs of a training on this machine, or 0 if it is not known.
        slots: the name and the CUDA_VISIBLE_DEVICES of each slot of a sweep.
    """

    device: str = "auto"
    strategy: str = "single"
    reason: str = ""
    settings: str = ""
    config_file: Mapping[str, str] | None = None
    cpus: int = 0
    slots: tuple[tuple[str, str], ...] = ()

    def variable(self) -> dict[str, str]:
        """Return the variable for the environment of the trainer."""
        decided = {
            name: value for name, value in vars(self).items() if value != getattr(LaunchFacts, name)
        }
        return {Internal.LAUNCH: json.dumps(decided)}


def launch_facts(env: Mapping[str, str]) -> LaunchFacts:
    """Return what the launch plan has decided for a process with the environment `env`."""
    return LaunchFacts(**json.loads(env.get(Internal.LAUNCH, "{}")))


def own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of our own processes. `environment` is theirs or a user's."""
    users = environment.get(_USERS, environment.get("PYTHONPATH", ""))
    return {**environment, "PYTHONPATH": _SEARCHED, _USERS: users}


def user_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a user's program. `environment` is our own processes' or a user's.

    It has no PYTHONPATH if the user's was empty, which is the same for Python.
    """
    if _USERS not in environment:
        return dict(environment)
    users = {"PYTHONPATH": environment[_USERS]} if environment[_USERS] else {}
    ours = ("PYTHONPATH", _USERS)
    return {name: value for name, value in environment.items() if name not in ours} | users


def restore_environment() -> None:
    """Give this process the user's environment. Call it before the code of a task runs."""
    users = user_environment(os.environ)
    for name in os.environ.keys() - users.keys():
        del os.environ[name]
    os.environ |= users


def user_folders(environment: Mapping[str, str]) -> list[str]:
    """Return the folders of the user's PYTHONPATH."""
    path = user_environment(environment).get("PYTHONPATH", "")
    return [folder for folder in path.split(os.pathsep) if folder]
