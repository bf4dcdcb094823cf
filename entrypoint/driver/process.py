"""The NVIDIA driver behind a deadline.

A call into a broken driver may hang forever. A forked process therefore makes all calls.
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

from entrypoint.driver.gpus import Gpu, visible_gpus
from entrypoint.driver.readings import Sample
from entrypoint.errors import HardwareMissing, InvalidRequest
from entrypoint.system.processes import die_with_parent

if TYPE_CHECKING:
    from entrypoint.driver.nvml import Detection

# The time for one answer. A healthy driver takes milliseconds. Without persistence mode it first
# wakes each GPU, which takes seconds.
DEADLINE_S = 10.0
DEADLINE_NAME = "TRAINBOX_DRIVER_DEADLINE_S"
_REVIVED_AFTER_S = 10.0
_WITHOUT_GPUS = "to train without GPUs, use --device cpu"
_POLL_S = 0.05


class NoAnswer(Exception):
    """A driver that did not answer within the deadline, or whose process died or failed."""


@dataclass(frozen=True)
class _Failure:
    """The error that the forked process sends instead of an answer."""

    text: str


def deadline_s() -> float:
    """Return the seconds to wait for the driver, from the environment or DEADLINE_S.

    Raises:
        InvalidRequest: the variable is not a number of seconds.
    """
    text = os.environ.get(DEADLINE_NAME) or str(DEADLINE_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise InvalidRequest(
            f"{DEADLINE_NAME}={text} is not a number of seconds up to 3600: set it as in "
            f"{DEADLINE_NAME}=60"
        )
    return seconds


class Driver:
    """A forked process that answers questions about the driver, one at a time.

    A fork is used because starting Python takes longer than all questions of a launch. If a caller
    gives up on a question, the question stays open. `answer` waits for it before the next one is
    sent, so hanging processes cannot pile up.
    """

    def __init__(self, lock: Path | None = None) -> None:
        """Fork. With `lock`, first wait until the process of an earlier caller is gone.

        Raises:
            NoAnswer: the earlier process still waits for the driver.
        """
        self.deadline_s = deadline_s()
        self._fork(_acquire(lock, self.deadline_s) if lock else None)
        # The kernel ends the process as well, but only after this program has exited.
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
            # The child keeps the lock while it exists, even if it hangs and cannot be killed.
            os.close(held)
        self._closed = False
        self.waiting_since_s: float | None = None
        self.died_at_s: float | None = None

    def ask(self, question: str, *arguments: Any) -> None:
        """Send a question, which is the name of a method of nvml.Session, and its arguments.

        Call `answer` for the result before you ask again.
        """
        self.waiting_since_s = time.monotonic()
        # `answer` raises if the process has died.
        with contextlib.suppress(BrokenPipeError):
            os.write(self._questions, _framed((question, arguments)))

    def answer(self, within_s: float | None = None) -> Any:
        """Return the answer to the open question. Wait at most `within_s`, or the deadline if None.

        Raises:
            NoAnswer: no answer yet, or the process died in the driver's library, or failed.
        """
        ready, _, _ = select.select(
            [self._answers], [], [], self.deadline_s if within_s is None else max(0.0, within_s)
        )
        if not ready:
            waited_s = time.monotonic() - (self.waiting_since_s or 0)
            raise NoAnswer(
                f"the NVIDIA driver does not answer: waited {waited_s:.0f} s (without persistence "
                f"mode it may only be slow: {DEADLINE_NAME} sets the limit)"
            )
        try:
            reply = _read_frame(self._answers)
        except EOFError:
            self.died_at_s = self.died_at_s or time.monotonic()
            raise NoAnswer(
                "the process that queries the NVIDIA driver died in the driver's library"
            ) from None
        self.waiting_since_s = None
        if isinstance(reply, _Failure):
            raise NoAnswer(f"the query of the NVIDIA driver failed: {reply.text}")
        return reply

    def revive(self) -> bool:
        """Replace a process that died some seconds ago. Return whether a process can answer.

        Do not call it in a program with threads: it forks.
        """
        if self.died_at_s is None:
            return True
        if time.monotonic() - self.died_at_s < _REVIVED_AFTER_S:
            return False
        self.close()
        self._fork()
        return True

    def detect(self) -> "Detection":
        """Return the GPUs that the driver lists. Raise NoAnswer after the deadline."""
        self.ask("detect")
        found: Detection = self.answer()
        return found

    def sample(self, uuids: Sequence[str], names: Sequence[str], events: bool = False) -> Sample:
        """Return one sample of the GPUs. Raise NoAnswer after the deadline."""
        self.ask("sample", tuple(uuids), tuple(names), events)
        seen: Sample = self.answer()
        return seen

    def close(self) -> None:
        """Kill the process. If it hangs in the kernel, it ends once its call returns."""
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
    """Answer questions until the other end is closed, then exit.

    This is the forked process. It never returns into its parent's code.
    """
    try:
        # Otherwise, a reader of the parent's output would wait for a process that hangs.
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP):
            # A scheduler signals all processes of a job. The parent ends this one.
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
    except BaseException as error:  # noqa: BLE001 - sent to the parent
        with contextlib.suppress(OSError):
            os.write(answered, _framed(_Failure(f"{type(error).__name__}: {error}")))
        os._exit(1)


def _close_all_but(*kept: int) -> None:
    """Close all inherited files but `kept`. A pipe's reader waits while a copy is open here."""
    try:
        open_ends = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - numbers
    except OSError:
        open_ends = list(range(1024))
    for end in set(open_ends) - {0, 1, 2, *kept}:
        with contextlib.suppress(OSError):
            os.close(end)


def _acquire(lock: Path, within_s: float) -> int:
    """Return a file descriptor that holds the lock.

    Raises:
        NoAnswer: another process held the lock for `within_s`.
    """
    import fcntl

    try:
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        # The lock cannot be made, for example on a read-only disk. Continue without it.
        return os.open(os.devnull, os.O_RDONLY)
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
    """Return the next value from the pipe, or raise EOFError at its end."""
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


def detect(driver: Driver) -> "Detection":
    """Return the GPUs that the driver lists.

    Raises:
        HardwareMissing: the driver is broken or does not answer.
    """
    try:
        found = driver.detect()
    except NoAnswer as error:
        raise HardwareMissing(
            f"{error}: see `nvidia-smi` on the host, or reboot it; {_WITHOUT_GPUS}"
        ) from error
    if found.broken:
        raise HardwareMissing(f"{found.broken}; {_WITHOUT_GPUS}")
    return found


def visible_to_cuda(found: "Detection") -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves."""
    return visible_gpus(found.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))
