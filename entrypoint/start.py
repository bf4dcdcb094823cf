"""Start the command `trainbox`, before it imports what a module of a user could replace."""

import os
import sys


def main() -> None:
    """Run the command. The folders of PYTHONPATH are those of a script, not of its launcher."""
    if "run" in sys.argv[1:3]:
        theirs = {os.path.abspath(folder) for folder in _folders()}  # noqa: PTH100 - pathlib, too
        sys.path.sort(key=lambda folder: folder in theirs)  # stable: they are searched last
    from entrypoint.cli.commands import main as command

    command()


def _folders() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]
