"""Start loader workers that end when they must, also where a fork could hang.

A worker leaves SIGTERM to its parent, so it is ended by SIGKILL. Before Python 3.11.10, the child
of a fork waits forever, before its first line, if another thread of the parent is just being
registered (python/cpython#112275). With torch 2.10 and newer, the threads of gloo and NCCL are
registered after each exchange, to free its tensors.
"""

import contextlib
import multiprocessing
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.popen_fork import Popen
from multiprocessing.process import BaseProcess
from types import FrameType

from trainbox.errors import Failure, signal_name
from trainer.data.sending import shared_memory_full

# A fork that does not run after this time is killed and started again, with twice the time.
_START_S = 2.0
_STARTS = 5
_END_S = 1.0  # the wait for the end of a worker that has closed its connections


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


# The workers that nobody has killed here.
_STARTED: "weakref.WeakSet[ForkProcess]" = weakref.WeakSet()


class _KilledProcess(ForkProcess):
    """A worker that is killed if it does not end, for example because of a thread of the task."""

    def start(self) -> None:
        super().start()
        _STARTED.add(self)

    def kill(self) -> None:
        _STARTED.discard(self)
        super().kill()

    def terminate(self) -> None:
        self.kill()


class EndsOfWorkers:
    """Lets torch raise its error for a worker that has ended only while a batch is waited for.

    torch's handler of SIGCHLD would raise it wherever this process is, such as in a library that
    holds a lock, where Python prints it as a traceback and goes on.
    """

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], object] = lambda *_: None
        self._waits = self._has_ended = False

    def delay(self, handler: Callable[[int, FrameType | None], object]) -> None:
        """Take the place of torch's `handler`."""
        self._handler = handler
        signal.signal(signal.SIGCHLD, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._has_ended = not self._waits
        if self._waits:
            self._handler(number, frame)

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Raise the error in the body, also for a worker that has ended before.

        Raises:
            RuntimeError: a worker has failed.
        """
        self._waits = True
        try:
            if self._has_ended:
                self._note(signal.SIGCHLD, None)
            yield
        finally:
            self._waits = False


ENDS = EndsOfWorkers()


def failure_of_worker() -> Failure | None:
    """Return the failure for a worker that has ended by itself, once, or None."""
    if not any(each.exitcode for each in _STARTED):
        # A worker closes its connections, which raises the error, before it has an exit code.
        closed = wait([each.sentinel for each in _STARTED], _END_S)
        for each in [each for each in _STARTED if each.sentinel in closed]:
            each.join(_END_S)
    ended = next((each for each in _STARTED if each.exitcode), None)
    if ended is None or ended.exitcode is None:
        return None
    _STARTED.clear()  # the failure ends the others as well
    code = ended.exitcode
    if code == -signal.SIGBUS:
        return shared_memory_full()
    how = f"exited with code {code}" if code > 0 else f"was killed by {signal_name(-code)}"
    cure = "the dataset or a library has ended it: use --workers 0 to see where"
    if code == -signal.SIGKILL:
        cure = "the system may be out of memory: lower --workers or --batch-size"
    elif code < 0:
        cure = (
            "a library of the dataset has crashed: see its line with PYTHONFAULTHANDLER=1 and "
            "--workers 0"
        )
    return Failure(f"a loader worker {how}: {cure}")


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
