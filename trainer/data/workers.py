"""Start loader workers, also with a Python in which a fork can hang.

Before Python 3.11.10, the child of a fork waits forever, before its first line, if another thread
of the parent is just being registered (python/cpython#112275). With torch 2.10 and newer, the
threads of gloo and NCCL are registered after each exchange, to free its tensors.
"""

import multiprocessing
import sys
from multiprocessing.connection import Connection, Pipe
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess

# A fork that does not run after this time is killed and started again, with twice the time.
_START_S = 2.0


def worker_context() -> ForkContext | None:
    """Return a context that starts a worker again until it runs, or None if no fork can hang."""
    if sys.platform != "linux" or sys.version_info >= (3, 11, 10):
        return None
    # This call does not choose a start method, so the task may still do so.
    method = multiprocessing.get_start_method(allow_none=True)
    return _CheckedContext() if method in (None, "fork") else None


class _CheckedProcess(ForkProcess):
    """A process that sends a message to its parent before it runs its target."""

    _writer: "Connection[bytes, bytes]"

    @staticmethod
    def _Popen(process: BaseProcess) -> Popen:  # noqa: N802 - multiprocessing's name
        assert isinstance(process, _CheckedProcess)
        limit_s = _START_S
        while True:
            reader, process._writer = Pipe(duplex=False)
            popen = ForkProcess._Popen(process)
            process._writer.close()
            with reader:
                if reader.poll(limit_s):
                    return popen
            popen.kill()
            popen.wait()
            popen.close()
            limit_s *= 2

    def run(self) -> None:
        self._writer.send_bytes(b"runs")
        self._writer.close()
        super().run()


class _CheckedContext(ForkContext):
    """The start method `fork` with processes that run for sure."""

    Process = _CheckedProcess
