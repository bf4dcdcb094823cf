"""Spell the commands that messages recommend as the user has to type them.

A host with only the image does not have the commands `trainbox` and `tensorboard`. So make,
docker-compose.yml and deploy/apptainer/trainbox.sh set TRAINBOX_COMMAND, which replaces `trainbox`.
"""

import os
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path


def nearest(name: str, known: Collection[str], otherwise: str = "", prefix: str = "") -> str:
    """Return a question with the known name that is nearest to `name`, after `prefix`.

    Without a near one, return `otherwise`, which by default lists the known names.
    """
    import difflib

    by_lower_case = {each.lower(): each for each in known}
    if near := difflib.get_close_matches(name.lower(), by_lower_case, n=1):
        return f"did you mean {prefix}{by_lower_case[near[0]]}?"
    return otherwise or f"use some of {', '.join(known)}"


def near_runs(run: Path, otherwise: str = "") -> str:
    """Return a question with the runs whose names are near a folder that does not exist.

    They are beside it, or in `runs` if it has only a name. Without a near one, return `otherwise`,
    which by default is an example.
    """
    parent = Path("runs") if run.name == str(run) else run.parent
    try:
        known = sorted(path.name for path in parent.iterdir() if path.is_dir())
    except OSError:
        known = []
    begun = [name for name in known if name.startswith(run.name)]
    if begun:
        return f"did you mean {' or '.join(str(parent / name) for name in begun[:3])}?"
    otherwise = otherwise or "give the folder of a run, such as runs/digits-7d2c"
    return nearest(run.name, known, otherwise, prefix=f"{parent}/")


def such_as(folder: Path) -> str:
    """Return an example of a run in `folder`, such as a trial of a sweep, or "" without one."""
    inside = min(folder.glob("*/config.json"), default=None)
    return f", such as {inside.parent}" if inside else ""


def command(verb: str, arguments: str = "") -> str:
    """Return the command line that runs `trainbox VERB ARGUMENTS`.

    `sweep run` is a verb as well.
    """
    typed = os.environ.get("TRAINBOX_COMMAND") or "trainbox"
    verb, _, form = verb.partition(" ")
    arguments = f"{form} {arguments}".strip()
    if typed != "make":
        if verb == "run" and typed.endswith(" train"):  # Compose has a service for this verb
            typed = typed.removesuffix(" train")
        return f"{typed} {verb} {arguments}".rstrip()
    if not arguments:
        return f"make {verb}"
    if verb == "run":
        script, _, others = arguments.partition(" -- ")
        return f"make run SCRIPT={script}" + (f' ARGS="{others}"' if others else "")
    if verb != "verify":
        return f'make {verb} ARGS="{arguments}"'
    run, _, others = arguments.partition(" ")
    return f"make verify RUN={run}" + (f' ARGS="{others}"' if others else "")


def run_command_line(
    options: Sequence[str], program: str, is_module: bool, arguments: Sequence[str]
) -> str:
    """Return the command line that runs `trainbox run OPTIONS PROGRAM -- ARGUMENTS`.

    The value of an argument with the name of a secret is not shown.
    """
    from trainbox.disclosure.secret_rule import arguments_without_secrets

    typed = os.environ.get("TRAINBOX_COMMAND") or "trainbox"
    own = shlex.join(options)
    its = shlex.join(arguments_without_secrets(arguments, to_copy=True))
    if typed == "make":
        variable = "MODULE" if is_module else "SCRIPT"
        line = f'make run {variable}={shlex.quote(program)} RUN_OPTIONS="{own}"'
        return f'{line} ARGS="{its}"' if its else line
    program = shlex.join(["-m", program] if is_module else [program])
    return command("run", f"{own} {program} -- {its}".removesuffix(" -- "))


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


def from_here(path: Path) -> str:
    """Return the path from the current folder, or an absolute one if it is elsewhere."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # it has been removed
        return str(path)
    path = here / path
    if ".." in path.parts:
        path = path.resolve()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
