"""`trainbox` whose launcher and ranks are forks: run by `Ranks.launch`, in a fork that has
torch loaded. The trainings of `trainbox bench` and `trainbox drill` are forks as well.
"""

import functools

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import entrypoint.cli.commands
from entrypoint.health import deep
from entrypoint.launch import inner_trainings, supervise
from tests.support.fork import fork_python, fork_with_output
from trainbox.processes.process_tree import die_with_parent

_start_child = functools.partial(fork_python, preexec_fn=die_with_parent)
for _module in (inner_trainings, supervise):
    _module.start_child = _start_child  # type: ignore[attr-defined]
deep.start_child = functools.partial(  # type: ignore[assignment]
    fork_with_output, preexec_fn=die_with_parent
)
subprocess_handler.Popen = fork_python  # type: ignore[assignment, misc]
entrypoint.cli.commands.main()
