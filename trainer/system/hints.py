"""Commands that messages recommend, spelled as they work where the user typed the one that runs
now.

TRAINBOX_COMMAND is what stands for `trainbox` there: make, docker-compose.yml and
deploy/apptainer/trainbox.sh set it, since a host with the image alone has no `trainbox` and no
`tensorboard`.
"""

import os
from pathlib import Path


def command(verb: str, options: str = "") -> str:
    """Return the command line that runs `trainbox VERB OPTIONS`."""
    typed = os.environ.get("TRAINBOX_COMMAND") or "trainbox"
    if options and typed == "make":
        options = f'ARGS="{options}"'
    return f"{typed} {verb} {options}".rstrip()


def tensorboard(folder: Path) -> str:
    """Return the command line that shows the curves of `folder`."""
    typed = os.environ.get("TRAINBOX_COMMAND") or ""
    if typed == "make":
        return "make tensorboard"
    if typed.startswith("docker compose "):
        return "docker compose up tensorboard"
    return f"{typed} tensorboard --logdir {folder}".lstrip()


def runs_dir() -> str:
    """Return the setting that names another folder for runs: a path of the host where this is a
    container.
    """
    return "RUNS_DIR" if os.environ.get("TRAINBOX_COMMAND") else "--runs-dir"
