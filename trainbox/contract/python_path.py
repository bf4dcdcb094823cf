"""PYTHONPATH of our own processes, in which no module of a user replaces ours, and the user's own.

At its start, `trainbox` puts its sys.path into PYTHONPATH, where the user's folders are last. Each
process of Trainbox inherits this. Programs and tasks of a user see the user's PYTHONPATH again.
"""

import os
import sys
from collections.abc import Mapping

from trainbox.contract.internal import Internal

_USERS = Internal.PYTHONPATH
_SEARCHED = os.pathsep.join(sys.path)  # before the code of a task can change it


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
