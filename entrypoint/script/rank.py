"""Become a rank of a user's script: `python -P -m entrypoint.script.rank COMMAND...`.

This process connects its output to the pipes of `trainbox run`, and then executes the command.
"""

import contextlib
import os
import signal
import sys
from pathlib import Path

from trainbox.contract.errors import ExitCode
from trainbox.contract.internal import Internal
from trainbox.contract.processes import die_with_parent
from trainbox.contract.python_path import user_environment
from trainbox.contract.streams import message

WORLD_SIZE = "world-size"  # the file in that folder with the number of ranks of all nodes
_OURS = (Internal.PIPES, Internal.MESSAGES)


def main() -> None:
    """Execute the command. On success, this does not return."""
    # The kernel also kills a script that ignores SIGTERM when its launcher is killed.
    if sys.platform == "linux":
        die_with_parent()
    for stop in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2):
        signal.signal(stop, signal.SIG_DFL)
    # SLURM sends SIGUSR1 to all processes of a step. It would end a script that has no handler for
    # it, before the script has saved at the SIGTERM from `trainbox run`.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in a shell; Python ignores it
    rank = os.environ.get("LOCAL_RANK", "0")
    if rank == "0":
        with contextlib.suppress(OSError):  # a full disk, where the manifest has the planned number
            size = os.environ.get("WORLD_SIZE", "1")
            Path(os.environ[Internal.PIPES], WORLD_SIZE).write_text(size, encoding="ascii")
    for name, stream in (("out", 1), ("err", 2)):
        pipe = os.open(f"{os.environ[Internal.PIPES]}/{rank}.{name}", os.O_WRONLY)
        os.dup2(pipe, stream)
        os.close(pipe)
    users = user_environment(os.environ)
    environment = {name: value for name, value in users.items() if name not in _OURS}
    command = sys.argv[1:]
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        message(f"{command[0]} cannot be executed ({error.strerror}): check its first line")
        sys.exit(ExitCode.WRONG_USE)


if __name__ == "__main__":
    main()
