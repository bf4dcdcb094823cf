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
