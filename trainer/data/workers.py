"""Start loader workers that end when they must, also where a fork could hang.

A worker leaves SIGTERM to its parent, so it is ended by SIGKILL. Before Python 3.11.10, the child
of a fork waits forever, before its first line, if another thread of the parent is just being
registered (python/cpython#112275). With torch 2.10 and newer, the threads of gloo and NCCL are
registered after each exchange, to free its tensors.
"""

import contextlib
import multiprocessing
import sys
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess

from trainbox.errors import Failure

# A fork that does not run after this time is killed and started again, with twice the time.
_START_S = 2.0
_STARTS = 5


def worker_context() -> ForkContext | None:
    """Return a context whose workers can be ended, or None for another start method.

    If a fork can hang, the context starts a worker again until it runs.
    """
    if sys.platform != "linux":
        return None
    # This call does not choose a start method, so the task may still do so.
    method = multiprocessing.get_start_method(allow_none=True)
    if method not in (None, "fork"):
        return None
    return _KilledContext() if sys.version_info >= (3, 11, 10) else _CheckedContext()


class _KilledProcess(ForkProcess):
    """A worker that is killed if it does not end, for example because of a thread of the task."""

    def terminate(self) -> None:
        self.kill()


class _CheckedProcess(_KilledProcess):
    """A process that runs its target when its parent has answered its message.

    Without an answer, a worker that is only slow could be killed while it holds the lock of the
    queue of its indices. The next worker would then wait forever for this lock.
    """

    # The end of the parent and the end of this process.
    _ends: "tuple[Connection[bytes, bytes], Connection[bytes, bytes]]"

    @staticmethod
    def _Popen(process: BaseProcess) -> Popen:  # noqa: N802 - multiprocessing's name
        assert isinstance(process, _CheckedProcess)
        limits_s = [_START_S * 2**start for start in range(_STARTS)]
        for limit_s in limits_s:
            process._ends = ours, theirs = Pipe()
            popen = ForkProcess._Popen(process)
            theirs.close()
            with ours:
                if ours.poll(limit_s):
                    with contextlib.suppress(OSError):  # it has died, which the loader reports
                        ours.send_bytes(b"run")
                    return popen
            popen.kill()
            popen.wait()
            popen.close()
        raise Failure(
            f"a loader worker did not start in {sum(limits_s):.0f} s, in {_STARTS} attempts: give "
            "the same command again, or use --workers 0"
        )

    def run(self) -> None:
        of_parent, own = self._ends
        of_parent.close()  # so that `recv_bytes` raises EOFError if the parent dies
        with own:
            own.send_bytes(b"ready")
            own.recv_bytes()
        super().run()


class _KilledContext(ForkContext):
    """The start method `fork` with processes that end for sure."""

    Process = _KilledProcess


class _CheckedContext(ForkContext):
    """The start method `fork` with processes that run for sure."""

    Process = _CheckedProcess
