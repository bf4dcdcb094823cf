"""Arguments that a script gets only if it can resume, such as `--resume {run}/last.pt`."""

import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from trainbox.errors import WrongUse
from trainbox.processes.streams import message

ON_RESUME = "--on-resume="


def files_in(arguments: Sequence[str]) -> list[str]:
    """Return the paths among the arguments, such as `a/b.pt` in `--resume=a/b.pt`."""
    return [argument.rpartition("=")[2] for argument in arguments if "/" in argument]


def for_rank(text: str, run: Path) -> str:
    """Return the argument for `entrypoint.script.rank` from the value of --on-resume.

    Raises:
        WrongUse: The quotes in it do not match, or it names no file.
    """
    try:
        arguments = shlex.split(text)
    except ValueError as error:
        raise WrongUse(f"--on-resume {text!r}: {error}: write it as in a shell") from error
    if not files_in(arguments):
        raise WrongUse(
            f"--on-resume {text!r} names no file that shows whether there is something to resume: "
            "give one with its folder, as in --on-resume '--resume {run}/last.pt'"
        )
    return ON_RESUME + shlex.join(argument.replace("{run}", str(run)) for argument in arguments)


def missing_file(option: str, folder: Path) -> str | None:
    """Return the message of a later start that a file of --on-resume does not exist, or None.

    `option` is the result of `for_rank`, and `folder` is the current folder of the script.
    """
    arguments = shlex.split(option.removeprefix(ON_RESUME))
    for path in files_in(arguments):
        # Path.exists raises PermissionError in a folder that the user may not read.
        if not os.path.exists(folder / path):  # noqa: PTH110
            patterns = "; patterns are not expanded" if any(c in path for c in "*?[") else ""
            return (
                f"the script begins again without {shlex.join(arguments)}: {path} of --on-resume "
                f"does not exist{patterns}"
            )
    return None


def with_resume(arguments: Sequence[str]) -> list[str]:
    """Return the command of the script from the arguments of this program.

    The arguments ARGS of a first `--on-resume=ARGS` follow the command if their files exist.
    """
    first, *command = arguments
    if not first.startswith(ON_RESUME):
        return [first, *command]
    added = shlex.split(first.removeprefix(ON_RESUME))
    if not all(map(os.path.exists, files_in(added))):
        return command
    if os.environ.get("RANK", "0") == "0":
        message(f"the script gets {shlex.join(added)}: the file exists")
    return [*command, *added]
