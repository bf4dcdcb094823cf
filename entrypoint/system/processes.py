"""The end of a child process whose parent has vanished."""

import ctypes
import signal

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Ask Linux to send SIGKILL to this process when its parent ends.

    Called in the child before it executes its program, so that no orphan trains on.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
