"""Train in a mount namespace of its own: `mounted SCRIPTS ARGUMENTS`, in a fork of `Ranks`.

SCRIPTS is a JSON list of shell scripts. The training starts once after each of them. The process
prints the exit code of each start except the last one, and has the exit code of the last one.
"""

import ctypes
import json
import os
import subprocess
import sys

from tests.support.fork import run_and_exit

_NEW_MOUNTS = 0x00020000  # CLONE_NEWNS of sched.h

*_earlier, _last = json.loads(sys.argv[1])


def _mount(script: str) -> None:
    subprocess.run(["sh", "-ec", script], check=True)


if ctypes.CDLL(None, use_errno=True).unshare(_NEW_MOUNTS):
    raise OSError(ctypes.get_errno(), "unshare failed")
_mount("mount --make-rprivate /")  # so that nobody else sees a mount
for _script in _earlier:
    _mount(_script)
    if (_pid := os.fork()) == 0:
        run_and_exit("trainer", sys.argv[2:])
    print("exit code", os.waitstatus_to_exitcode(os.waitpid(_pid, 0)[1]), flush=True)
_mount(_last)
run_and_exit("trainer", sys.argv[2:])
