"""Become a rank of a user's script: `python -P -m entrypoint.script.rank [OPTION] COMMAND...`.

This process connects its output to the pipes of `trainbox run`, and then executes the command.
"""

import _signal  # type: ignore[import-not-found]

# Ctrl-C ends the imports below without a traceback.
if _signal.getsignal(_signal.SIGINT) is _signal.default_int_handler:
    _signal.signal(_signal.SIGINT, _signal.SIG_DFL)

import os
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from entrypoint.script.on_resume import with_resume
from trainbox.errors import ExitCode
from trainbox.processes.environment import Internal, user_environment
from trainbox.processes.process_tree import die_with_parent
from trainbox.processes.slurm import as_slurm_task
from trainbox.processes.streams import message

_OF_A_RANK = (  # in the order of the arguments of as_slurm_task
    "RANK",
    "LOCAL_RANK",
    "GROUP_RANK",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE",
)
_OURS = (Internal.AGENT, Internal.PIPES, Internal.MESSAGES)


def main() -> None:
    """Execute the command. On success, this does not return."""
    # The kernel also kills a script that ignores SIGTERM when its launcher is killed. Without
    # torchrun, the supervisor has arranged this.
    if agent := os.environ.get(Internal.AGENT):
        die_with_parent(int(agent))
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, signal.SIG_DFL)
    # A scheduler sends its warning to all processes of a job. It would end a script that has no
    # handler for it, before the script has saved at the SIGTERM from `trainbox run`.
    for warning in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU):
        signal.signal(warning, signal.SIG_IGN)
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # as in a shell; Python ignores it
    rank, folder = os.environ.get("LOCAL_RANK", "0"), Path(os.environ[Internal.PIPES])
    streams = {1: folder / f"{rank}.out", 2: folder / f"{rank}.err"}
    if os.environ.get("RANK", "0") != "0":
        streams[0] = Path(os.devnull)  # of several readers, each would get parts of the input
    for stream, path in streams.items():
        opened = os.open(path, (os.O_WRONLY if stream else os.O_RDONLY) | os.O_NOCTTY)
        os.dup2(opened, stream)
        os.close(opened)
    command = with_resume(sys.argv[1:])
    environment = script_environment(user_environment(os.environ), command)
    try:
        os.execvpe(command[0], command, environment)
    except OSError as error:
        message(f"{command[0]} cannot be executed ({error.strerror}): check its first line")
        sys.exit(ExitCode.WRONG_USE)


def script_environment(users: Mapping[str, str], command: Sequence[str]) -> dict[str, str]:
    """Return the environment of the script, given the user's with the variables of torchrun."""
    environment = {name: value for name, value in users.items() if name not in _OURS}
    if "RANK" in environment:  # set by torchrun
        environment = as_slurm_task(environment, *(int(environment[name]) for name in _OF_A_RANK))
    if "TORCHELASTIC_USE_AGENT_STORE" in environment and command[0] != sys.executable:
        # torch before 2.2 cannot connect to the store of a newer one. So rank 0 serves a store.
        environment["MASTER_PORT"] = str(int(environment["MASTER_PORT"]) + 1)
        environment["TORCHELASTIC_USE_AGENT_STORE"] = "False"
    return environment


if __name__ == "__main__":
    main()
