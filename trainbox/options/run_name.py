"""The name of a script's run, and of the script in it."""

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from trainbox.errors import WrongUse

_LENGTH = 40
# The number of a task of an array in SLURM, PBS Pro, Torque, Grid Engine and LSF. Outside of an
# array, Grid Engine sets "undefined", and LSF sets 0.
_TASKS = ("SLURM_ARRAY_TASK_ID", "PBS_ARRAY_INDEX", "PBS_ARRAYID", "SGE_TASK_ID", "LSB_JOBINDEX")


def run_name(
    script: str, is_module: bool, arguments: Sequence[str], env: Mapping[str, str] = os.environ
) -> str:
    """Return the name of the run folder of a command: the same command has the same name.

    Each task of a scheduler's array has its own name, because a script can read its number.

    Args:
        script: the path of the script as the user wrote it, or the dotted name of a module.
        is_module: whether Python runs the script with -m.
        arguments: the script's own arguments.
        env: the environment, which has the number of the array's task.
    """
    name = f"{script_label(script, is_module)}-{short_digest([is_module, script, *arguments])}"
    task = array_task(env)
    return name if task is None else f"{name}-array-{task}"


def array_task(env: Mapping[str, str]) -> int | None:
    """Return the number of this task of a scheduler's array, or None outside of an array."""
    for name in _TASKS:
        value = env.get(name, "")
        if value.isascii() and value.isdecimal() and (name, value) != ("LSB_JOBINDEX", "0"):
            return int(value)
    return None


def short_digest(identity: Any) -> str:
    """Return eight hex digits of a value of JSON, which a default name of a folder ends with."""
    import hashlib  # it loads OpenSSL, which takes 8 ms

    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:8]


def check_run_name(name: str | None, option: str = "--run") -> None:
    """Raise WrongUse if `name`, the value of `option`, cannot be the name of a folder."""
    if name is None:
        return
    if any("\ud800" <= character <= "\udfff" for character in name):
        raise WrongUse(
            f"{option} {name!r} has bytes that are no characters in the encoding here "
            f"({sys.getfilesystemencoding()}): use other characters, or set LC_ALL=C.UTF-8, and no "
            "PYTHONUTF8=0"
        )
    is_plain = name == PurePath(name).name and name.isprintable() and not name.startswith(".")
    if not (name and is_plain and len(os.fsencode(name)) <= 255):
        raise WrongUse(
            f"{option} {name!r} must be a folder name of at most 255 bytes, not a path: set the "
            "parent folder with --runs-dir"
        )


def script_label(script: str, is_module: bool) -> str:
    """Return the script's name for the name of a folder."""
    path = PurePath(script)
    if is_module:
        last = script.rpartition(".")[2]
    else:
        last = path.parent.name if path.stem == "__main__" else path.stem
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", last).strip("-.")
    return plain[:_LENGTH] or "script"
