"""The NVIDIA driver behind a deadline: a forked process asks it, since a driver that hangs takes
its caller with it.
"""

import atexit
import contextlib
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from entrypoint.driver.readings import Sample
from entrypoint.errors import InvalidRequest
from entrypoint.system.processes import die_with_parent

if TYPE_CHECKING:
    from entrypoint.driver.nvml import Detection

# Of an answer. A healthy driver takes milliseconds; without persistence mode it wakes each GPU
# first, which takes seconds.
DEADLINE_S = 10.0
DEADLINE_NAME = "TRAINBOX_DRIVER_DEADLINE_S"
_REVIVED_AFTER_S = 10.0
_POLL_S = 0.05


class NoAnswer(Exception):
    """The driver did not answer within the deadline, or the process that asked it died or
    failed.
    """


@dataclass(frozen=True)
class _Failure:
    """What the asking process sends where it has no answer."""

    text: str


def deadline_s() -> float:
    """The seconds to wait for the driver: DEADLINE_S, or what the environment says.

    Raises:
        InvalidRequest: that is no number of seconds.
    """
    said = os.environ.get(DEADLINE_NAME) or str(DEADLINE_S)
    try:
        seconds = float(said)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise InvalidRequest(
            f"{DEADLINE_NAME}={said} is no number of seconds up to 3600: write it as in "
            f"{DEADLINE_NAME}=60"
        )
    return seconds


class Driver:
    """A process that asks the driver on request, one question at a time.

    It is forked and not started anew, since a start of Python would take longer than all the
    questions of a launch. A question that was given up stays under way: `answer` waits for it
    before the next is asked, so that no second process can pile up.
    """

    def __init__(self, lock: Path | None = None) -> None:
        """Fork. With `lock`, wait first until the process of an earlier caller is gone.

        Raises:
            NoAnswer: that one still waits for the driver.
        """
        self.deadline_s = deadline_s()
        self._fork(_acquire(lock, self.deadline_s) if lock else None)
        # the kernel would end the process too, but only after this program has exited
        atexit.register(self.close)

    def _fork(self, held: int | None = None) -> None:
        asked, self._questions = os.pipe()
        self._answers, answered = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            _close_all_but(asked, answered, *([] if held is None else [held]))
            _serve(asked, answered)
        os.close(asked)
        os.close(answered)
        if held is not None:
            # the child has it for as long as it lives, and be it that it cannot even be killed
            os.close(held)
        self._closed = False
        self.waiting_since_s: float | None = None
        self.died_at_s: float | None = None

    def ask(self, question: str, *arguments: Any) -> None:
        """Send a question, the name of a method of nvml.Session; `answer` has what comes back.

        One at a time.
        """
        self.waiting_since_s = time.monotonic()
        with contextlib.suppress(BrokenPipeError):  # `answer` tells
            os.write(self._questions, _framed((question, arguments)))

    def answer(self, within_s: float | None = None) -> Any:
        """What came back to the question under way, in at most `within_s` (the deadline, if that is
        None).

        Raises:
            NoAnswer: nothing yet; or the asking process died in the driver's library, or failed.
        """
        ready, _, _ = select.select(
            [self._answers], [], [], self.deadline_s if within_s is None else max(0.0, within_s)
        )
        if not ready:
            waited_s = time.monotonic() - (self.waiting_since_s or 0)
            raise NoAnswer(
                f"the NVIDIA driver does not answer: waited {waited_s:.0f} s (without "
                "persistence mode it may only be slow: "
                f"{DEADLINE_NAME} sets how long)"
            )
        try:
            came = _read_frame(self._answers)
        except EOFError:
            self.died_at_s = self.died_at_s or time.monotonic()
            raise NoAnswer(
                "the process that asks the NVIDIA driver has died in the driver's library"
            ) from None
        self.waiting_since_s = None
        if isinstance(came, _Failure):
            raise NoAnswer(f"asking the NVIDIA driver failed: {came.text}")
        return came

    def revive(self) -> bool:
        """Fork anew for a process that has died, some seconds after that; whether there is one to
        ask.

        Not where this program has threads.
        """
        if self.died_at_s is None:
            return True
        if time.monotonic() - self.died_at_s < _REVIVED_AFTER_S:
            return False
        self.close()
        self._fork()
        return True

    def detect(self) -> "Detection":
        """The GPUs that there are; NoAnswer after the deadline."""
        self.ask("detect")
        found: Detection = self.answer()
        return found

    def sample(self, uuids: Sequence[str], names: Sequence[str], events: bool = False) -> Sample:
        """One look at the GPUs; NoAnswer after the deadline."""
        self.ask("sample", tuple(uuids), tuple(names), events)
        seen: Sample = self.answer()
        return seen

    def close(self) -> None:
        """End the process.

        If it hangs in the kernel, it ends later, when the driver lets go of it.
        """
        if self._closed:
            return
        self._closed = True
        for end in (self._questions, self._answers):
            os.close(end)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 1
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0) and time.monotonic() < deadline_s:
                time.sleep(_POLL_S / 50)


def _serve(asked: int, answered: int) -> NoReturn:
    """The forked process: answer until the other end is closed.

    It never returns into its parent's code.
    """
    try:
        # Who waits for the end of the parent's output must not wait for a process that hangs in the
        # driver.
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(nothing, stream)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            # a scheduler signals all of a job; the parent says when this one ends
            signal.signal(number, signal.SIG_IGN)
        if sys.platform == "linux":
            die_with_parent()
        from entrypoint.driver.nvml import Session

        session = Session()
        while True:
            question, arguments = _read_frame(asked)
            os.write(answered, _framed(getattr(session, question)(*arguments)))
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - told to the parent
        with contextlib.suppress(OSError):
            os.write(answered, _framed(_Failure(f"{type(error).__name__}: {error}")))
        os._exit(1)


def _close_all_but(*kept: int) -> None:
    """Other ends of pipes, say: while one is open here, its reader waits for more."""
    try:
        open_ends = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - numbers
    except OSError:
        open_ends = list(range(1024))
    for end in set(open_ends) - {0, 1, 2, *kept}:
        with contextlib.suppress(OSError):
            os.close(end)


def _acquire(lock: Path, within_s: float) -> int:
    """A descriptor that holds the lock.

    Raises:
        NoAnswer: another process holds it all the time.
    """
    import fcntl

    try:
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        return os.open(os.devnull, os.O_RDONLY)  # no place to keep count: go on without
    deadline_s = time.monotonic() + within_s
    while True:
        try:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline_s:
                os.close(held)
                raise NoAnswer(
                    "the NVIDIA driver does not answer: an earlier probe still waits for it"
                ) from None
            time.sleep(_POLL_S)
        else:
            return held


def _framed(value: Any) -> bytes:
    body = pickle.dumps(value)
    return len(body).to_bytes(4, "big") + body


def _read_frame(end: int) -> Any:
    """One value from the pipe: both ends are this program. EOFError at its end."""
    size = int.from_bytes(_read_exactly(end, 4), "big")
    return pickle.loads(_read_exactly(end, size))  # noqa: S301


def _read_exactly(end: int, size: int) -> bytes:
    parts = b""
    while len(parts) < size:
        part = os.read(end, size - len(parts))
        if not part:
            raise EOFError
        parts += part
    return parts
