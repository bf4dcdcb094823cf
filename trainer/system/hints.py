"""Spell the commands that messages recommend as the user has to type them.

A host with only the image does not have the commands `trainbox` and `tensorboard`. So make,
docker-compose.yml and deploy/apptainer/trainbox.sh set TRAINBOX_COMMAND, which replaces `trainbox`.
"""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainbox.contract.secret_rule import arguments_without_secrets


def command(verb: str, options: str = "") -> str:
    """Return the command line that runs `trainbox VERB OPTIONS`.

    `sweep run` is a verb as well.
    """
    typed = os.environ.get("TRAINBOX_COMMAND") or "trainbox"
    verb, _, form = verb.partition(" ")
    options = f"{form} {options}".strip()
    if options and typed == "make":
        options = f'ARGS="{options}"'
    return f"{typed} {verb} {options}".rstrip()


def run_command_line(
    options: Sequence[str], program: str, is_module: bool, arguments: Sequence[str]
) -> str:
    """Return the command line that runs `trainbox run OPTIONS PROGRAM -- ARGUMENTS`.

    The value of an argument with the name of a secret is not shown.
    """
    typed = os.environ.get("TRAINBOX_COMMAND") or "trainbox"
    own = shlex.join(options)
    its = shlex.join(arguments_without_secrets(arguments, to_copy=True))
    if typed == "make":
        variable = "MODULE" if is_module else "SCRIPT"
        line = f'make run {variable}={shlex.quote(program)} RUN_OPTIONS="{own}"'
        return f'{line} ARGS="{its}"' if its else line
    if typed.endswith(" train"):  # Compose has a service for this verb
        typed = typed.removesuffix(" train")
    program = shlex.join(["-m", program] if is_module else [program])
    return f"{typed} run {own} {program} -- {its}".removesuffix(" -- ")


def tensorboard(folder: Path) -> str:
    """Return the command line that shows the curves of `folder`."""
    typed = os.environ.get("TRAINBOX_COMMAND") or ""
    if typed == "make":
        return "make tensorboard"
    if typed.startswith("docker compose "):
        return "docker compose up tensorboard"
    return f"{typed} tensorboard --logdir {shlex.quote(str(folder))}".lstrip()


def runs_dir() -> str:
    """Return the name of the setting for the folder of runs.

    In a container, this is the setting for the host's folder.
    """
    return "RUNS_DIR" if os.environ.get("TRAINBOX_COMMAND") else "--runs-dir"
