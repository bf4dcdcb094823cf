"""`trainbox` whose launcher and ranks are forks: run by `Ranks.launch`, in a fork that has
torch loaded. The trainings of `trainbox bench` and `trainbox drill` are forks as well.
"""

import functools
import subprocess
from types import SimpleNamespace

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import entrypoint.cli.commands
from entrypoint.bench import runs
from entrypoint.drill import starts
from entrypoint.health import deep
from entrypoint.launch import supervise
from tests.support.fork import fork_python, fork_with_output
from trainbox.contract.processes import die_with_parent

supervise.subprocess = SimpleNamespace(  # type: ignore[assignment]
    Popen=fork_python, TimeoutExpired=subprocess.TimeoutExpired
)
deep.subprocess = SimpleNamespace(  # type: ignore[assignment]
    Popen=fork_with_output,
    TimeoutExpired=subprocess.TimeoutExpired,
    DEVNULL=subprocess.DEVNULL,
    PIPE=subprocess.PIPE,
)
subprocess_handler.Popen = fork_python  # type: ignore[assignment, misc]
runs.start_child = starts.start_child = functools.partial(fork_python, preexec_fn=die_with_parent)  # type: ignore[assignment]
entrypoint.cli.commands.main()
