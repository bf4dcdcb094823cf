"""`trainbox` whose check, launcher and ranks are forks: run by `Ranks.launch`, in a fork that has
torch loaded.
"""

import subprocess
from types import SimpleNamespace

from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

import entrypoint.cli.checking
import entrypoint.cli.commands
from entrypoint.launch import supervise
from tests.support.fork import fork_python
from tests.support.forked import CheckHere

entrypoint.cli.checking.ForkedModule = CheckHere  # type: ignore[assignment,misc]
supervise.subprocess = SimpleNamespace(  # type: ignore[assignment]
    Popen=fork_python, TimeoutExpired=subprocess.TimeoutExpired
)
subprocess_handler.Popen = fork_python  # type: ignore[assignment, misc]
entrypoint.cli.commands.main()
