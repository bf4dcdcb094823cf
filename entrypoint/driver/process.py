"""The NVIDIA driver behind a deadline.

A call into a broken driver may hang forever, or crash. A process of its own therefore makes all
calls.
"""

import atexit
import contextlib
import ctypes
import math
import os
import pickle
import select
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from entrypoint.driver.gpus import NO_ANSWER, Detection, Gpu, Sample, hides_all, visible_gpus
from entrypoint.system.container import in_container
from entrypoint.system.nvidia import given_gpus
from trainbox.errors import DeviceMissing, WrongUse
from trainbox.processes.process_tree import die_with_parent, ignore_stop_signals
from trainbox.processes.programs import DRIVER, command_of

# The time for one answer. A healthy driver takes milliseconds. Without persistence mode it first
# wakes each GPU, which takes seconds.
DEADLINE_S = 10.0
DEADLINE_NAME = "TRAINBOX_DRIVER_DEADLINE_S"
_REVIVED_AFTER_S = 10.0
_WITHOUT_GPUS = "to train without GPUs, use --device cpu"
_WITHOUT_LIBRARY = "no NVIDIA driver here (NVML: NVML Shared Library Not Found)"
_POLL_S = 0.05


@dataclass(frozen=True)
class _Begins:
    """The name of the reading that the process makes next, or "" after the last one of a GPU."""

    reading: str


def deadline_s() -> float:
    """Return the seconds to wait for the driver, from the environment or DEADLINE_S.

    Raises:
        WrongUse: the variable is not a number of seconds.
    """
    text = os.environ.get(DEADLINE_NAME) or str(DEADLINE_S)
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 3600:
        raise WrongUse(
            f"{DEADLINE_NAME}={text} is not a number of seconds up to 3600: set it as in "
            f"{DEADLINE_NAME}=60"
        )
    return seconds


class Driver:
    """A process that answers questions about the driver, one at a time.

    The first one is forked, because starting Python takes longer than all questions of a launch. If
    a caller gives up on a question, the question stays open. `answer` waits for it before the next
    one is sent, so hanging processes cannot pile up.

    A reading in which the process crashed once or hung twice is left out for some minutes, and all
    others are still made. A single hang may be one of the whole driver, which no reading causes.
    """

    def __init__(self, lock: Path | None = None) -> None:
        """Fork. With `lock`, first wait until the process of an earlier caller is gone.

        Raises:
            DeviceMissing: the earlier process still waits for the driver.
        """
        self.deadline_s = deadline_s()
        self._replaceable = lock is None  # a probe ends soon and starts no second process
        self._left_out, self._hung = set[str](), set[str]()
        self._start(held=_acquire(lock, self.deadline_s) if lock else None)
        # The kernel ends the process as well, but only after this program has exited.
        atexit.register(self.close)

    def _start(self, held: int | None = None, forks: bool = True) -> None:
        """Start the process, which keeps `held` open. Only a program without threads may fork."""
        asked, self._questions = os.pipe()
        self._answers, answered = os.pipe()
        if forks:
            self.pid = os.fork()
            if self.pid == 0:
                serve(asked, answered, [] if held is None else [held], ())
        else:
            for end in (asked, answered):
                os.set_inheritable(end, True)
            argv = command_of(DRIVER, str(asked), str(answered), *sorted(self._left_out))
            self.pid = os.posix_spawn(argv[0], argv, os.environ)
        os.close(asked)
        os.close(answered)
        if held is not None:
            # The child keeps the lock while it exists, even if it hangs and cannot be killed.
            os.close(held)
        self._closed = self._ended = False
        self._reading = ""
        self.waiting_since_s: float | None = None
        self.died_at_s: float | None = None

    def ask(self, question: str, *arguments: Any) -> None:
        """Send a question, which is the name of a method of nvml.Session, and its arguments.

        Call `answer` for the result before you ask again.
        """
        self.waiting_since_s, self._reading = time.monotonic(), ""
        # `answer` raises if the process has died.
        with contextlib.suppress(BrokenPipeError):
            _send(self._questions, (question, arguments))

    def answer(self, within_s: float | None = None) -> Any:
        """Return the answer to the open question. Wait at most `within_s`, or the deadline if None.

        Raises:
            DeviceMissing: no answer yet, or the process died in the driver's library, or failed.
        """
        limit_s = time.monotonic() + (self.deadline_s if within_s is None else max(0.0, within_s))
        reply: Any = _Begins("")
        while isinstance(reply, _Begins):
            left_s = max(0.0, limit_s - time.monotonic())
            if not select.select([self._answers], [], [], left_s)[0]:
                waited_s = time.monotonic() - (self.waiting_since_s or 0)
                raise DeviceMissing(
                    f"the NVIDIA driver does not answer{self._where()}: waited {waited_s:.0f} s "
                    f"(without persistence mode it may only be slow: {DEADLINE_NAME} sets the "
                    "limit)"
                )
            try:
                reply = _read_frame(self._answers)
            except EOFError:
                self.died_at_s = self.died_at_s or time.monotonic()
                raise DeviceMissing(
                    "the process that queries the NVIDIA driver died in the driver's "
                    f"library{self._where()}"
                ) from None
            if isinstance(reply, _Begins):
                self._reading = reply.reading
        self.waiting_since_s = None
        if isinstance(reply, DeviceMissing):
            self.died_at_s = time.monotonic()
            raise DeviceMissing(f"the query of the NVIDIA driver failed{self._where()}: {reply}")
        return reply

    def _where(self) -> str:
        return f" (reading {self._reading})" if self._reading else ""

    def revive(self) -> bool:
        """Replace a process that died, or that hangs in a reading beyond the deadline.

        Return whether a process can answer. If no reading is to blame, a process that died is
        replaced some seconds later, and a process that hangs is kept.
        """
        waits_s = time.monotonic() - (self.waiting_since_s or math.inf)
        if self.died_at_s is None and waits_s < self.deadline_s:
            return True
        if self.leave_out():
            return True
        if self.died_at_s is None or time.monotonic() - self.died_at_s < _REVIVED_AFTER_S:
            return False
        self.close()
        self._start(forks=False)
        return True

    def leave_out(self) -> bool:
        """Replace a process that has not answered in time because of a reading.

        Return whether this was done, so that the question can be asked again. It is not done for
        each reading more than twice.
        """
        reading = self._reading
        # A process that hangs in the kernel cannot be killed. It then stays the only one.
        if not reading or not self._replaceable or not self._killed():
            return False
        if self.died_at_s is not None or reading in self._hung:
            self._left_out.add(reading)
        self._hung.add(reading)
        self.close()
        self._start(forks=False)
        return True

    def detect(self) -> Detection:
        """Return the GPUs that the driver lists. A driver that does not answer is broken."""
        self.ask("detect")
        try:
            found: Detection = self.answer()
        except DeviceMissing as error:
            remedy = "see `nvidia-smi` on the host, or reboot it"
            return Detection(broken=f"{error}: {remedy}", code=NO_ANSWER)
        return found

    def sample(self, uuids: Sequence[str], names: Sequence[str], events: bool = False) -> Sample:
        """Return one sample of the GPUs. Raise DeviceMissing after the deadline."""
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
        self._killed()

    def _killed(self) -> bool:
        """Kill the process, and return whether it has ended."""
        if self._ended:
            return True
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        deadline_s = time.monotonic() + 1
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(self.pid, os.WNOHANG) == (0, 0):
                if time.monotonic() > deadline_s:
                    return False
                time.sleep(_POLL_S / 50)
        self._ended = True  # another process may get its id
        return True


def serve(asked: int, answered: int, kept: Sequence[int], left_out: Sequence[str]) -> NoReturn:
    """Answer questions until the other end is closed, then exit.

    This is the process that makes the calls. If it was forked, it never returns into its parent's
    code. Of its inherited files, only the two pipes and `kept` stay open.
    """
    try:
        _close_all_but(asked, answered, *kept)
        # Otherwise, a reader of the parent's output would wait for a process that hangs.
        null = os.open(os.devnull, os.O_RDWR)
        for stream in range(3):
            os.dup2(null, stream)
        ignore_stop_signals()  # a scheduler signals all processes of a job; the parent ends this
        if sys.platform == "linux":
            die_with_parent()
        session: Any = None
        while True:
            question, arguments = _read_frame(asked)
            if question == "detect" and not _has_library():
                _send(answered, Detection(absent=_WITHOUT_LIBRARY))
                continue
            if session is None:
                from entrypoint.driver.nvml import Session

                session = Session(left_out, lambda name: _send(answered, _Begins(name)))
            _send(answered, getattr(session, question)(*arguments))
    except (EOFError, BrokenPipeError):
        os._exit(0)
    except BaseException as error:  # noqa: BLE001 - sent to the parent
        with contextlib.suppress(OSError):
            _send(answered, DeviceMissing(f"{type(error).__name__}: {error}"))
        os._exit(1)


def _has_library() -> bool:
    """Return whether the driver's library can be loaded.

    Without it, pynvml would answer the same, but its import takes longer than a launch plan.
    """
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def _close_all_but(*kept: int) -> None:
    """Close all inherited files but `kept`. A pipe's reader waits while a copy is open here."""
    try:
        open_ends = [int(name) for name in os.listdir("/proc/self/fd")]  # noqa: PTH208 - numbers
    except OSError:
        open_ends = list(range(1024))
    for end in set(open_ends) - {0, 1, 2, *kept}:
        with contextlib.suppress(OSError):
            os.close(end)


def lock_of_probes() -> Path | None:
    """Return the lock of this user's liveness probes, or None without a temporary folder.

    Without the lock, probes of a driver that hangs may pile up.
    """
    import tempfile

    with contextlib.suppress(OSError):
        return Path(tempfile.gettempdir()) / f"trainbox-live-{os.getuid()}.lock"
    return None


def _acquire(lock: Path, within_s: float) -> int:
    """Return a file descriptor that holds the lock.

    Raises:
        DeviceMissing: another process held the lock for `within_s`.
    """
    from trainbox.files.regular_files import take_lock  # for probes only

    try:
        held = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError:
        # The lock cannot be made, for example on a read-only disk. Continue without it.
        return os.open(os.devnull, os.O_RDONLY)
    deadline_s = time.monotonic() + within_s
    while not take_lock(held):
        if time.monotonic() > deadline_s:
            os.close(held)
            raise DeviceMissing(
                "the NVIDIA driver does not answer: an earlier probe still waits for it"
            )
        time.sleep(_POLL_S)
    return held


def _send(end: int, value: Any) -> None:
    body = pickle.dumps(value)
    os.write(end, len(body).to_bytes(4, "big") + body)


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


def detect(driver: Driver) -> Detection:
    """Return the GPUs that the driver lists.

    Raises:
        DeviceMissing: the driver is broken or does not answer, or this process was given GPUs
            without the driver's library.
    """
    found = driver.detect()
    if found.broken:
        raise DeviceMissing(f"{found.broken}; {_WITHOUT_GPUS}")
    hidden = hides_all(os.environ.get("CUDA_VISIBLE_DEVICES"))
    if found.absent and not hidden and (seen := given_gpus(in_container())):
        remedy = (
            "start the container with --gpus all and NVIDIA_DRIVER_CAPABILITIES=compute,utility"
            if in_container()
            else "install the driver's user-space packages, such as libnvidia-compute"
        )
        raise DeviceMissing(f"{found.absent}, but {seen}: {remedy}; {_WITHOUT_GPUS}")
    return found


def visible_to_cuda(found: Detection) -> tuple[Gpu, ...]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves."""
    return visible_gpus(found.gpus, os.environ.get("CUDA_VISIBLE_DEVICES"))


if __name__ == "__main__":
    # The classes of answers must have the name of this module, not `__main__`.
    from entrypoint.driver import process  # noqa: PLW0406

    _asked, _answered, *_left_out = sys.argv[1:]
    process.serve(int(_asked), int(_answered), (), _left_out)
