"""The output of a script's ranks: to this process's streams, and to one log for each rank."""

import errno
import json
import os
import select
import selectors
import termios
import threading
import tty
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol, Self

# A log is replaced by an empty one at this size, and the one before it is kept as NAME.1.log.
LOG_BYTES = 64 * 2**20
_READ_BYTES = 2**16
_LONGEST_REPORT = 2**16
_NO_REPORT = b"a line that is too long: "
_LOOK_EVERY_S = 0.2
PATIENCE_S = 5.0


class Log:
    """A log file of bounded size: at most twice `limit` bytes, of which the newest stay."""

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        """Open the log to append.

        Raises:
            OSError: the file cannot be opened.
        """
        self.path, self._limit = path, limit
        self._file = path.open("ab", buffering=0)
        self.lost: str | None = None

    def write(self, data: bytes) -> None:
        """Append `data`. If this fails once, `lost` has the reason, and nothing more is written."""
        if self.lost is not None:
            return
        try:
            if self._file.tell() + len(data) > self._limit:
                self._file.close()
                self.path.replace(self.path.with_suffix(".1.log"))
                self._file = self.path.open("ab", buffering=0)
            if (self._file.write(data) or 0) < len(data):  # the rest did not fit on the disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except (OSError, ValueError) as error:
            self.lost = getattr(error, "strerror", None) or str(error)

    def close(self) -> None:
        self._file.close()


class Writer(Protocol):
    """Where the output of a rank is shown."""

    def write(self, data: bytes, /) -> object: ...


class Shown:
    """A standard stream of this process, whose reader may be slow.

    A write waits for the reader. After a stop signal, it waits for at most `PATIENCE_S` in all, so
    that the script can save and this process can exit.
    """

    def __init__(self, number: int, stopping: Callable[[], bool]) -> None:
        self._number, self._stopping = number, stopping
        self._waited_s = 0.0

    def write(self, data: bytes) -> None:
        """Write `data`.

        Raises:
            OSError: the reader has gone, or it does not read.
        """
        while data:
            if not select.select([], [self._number], [], _LOOK_EVERY_S)[1]:
                if self._stopping():
                    self._waited_s += _LOOK_EVERY_S
                if self._waited_s > PATIENCE_S:
                    raise TimeoutError("the reader of the output does not read")
                continue
            # A part of this size never blocks when the reader of a pipe has made room.
            with suppress(BlockingIOError):
                data = data[os.write(self._number, data[: select.PIPE_BUF]) :]


class Stream:
    """One stream of one rank: passes its bytes on, by whole lines or at once."""

    def __init__(
        self,
        log: Log,
        shown: Writer | None,
        prefix: bytes = b"",
        whole_lines: bool = True,
        report: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Pass bytes on to `shown`, each line after `prefix`.

        Without `whole_lines`, bytes are passed on at once, so that a progress bar moves. `report`
        gets each line that is a JSON object with a step.
        """
        self._log, self._shown, self._prefix = log, shown, prefix
        self._whole_lines, self._report = whole_lines, report
        self._shown_part = self._line = b""

    def take(self, data: bytes) -> None:
        """Take new bytes of the rank."""
        self._log.write(data)
        if self._shown is not None:
            self._show(data)
        if self._report is not None:
            *lines, self._line = (self._line + data).split(b"\n")
            for line in lines:
                if (entry := reported(line)) is not None:
                    self._report(entry)
            if len(self._line) > _LONGEST_REPORT:
                self._line = _NO_REPORT  # so that its end is not taken for a report

    def look(self, is_last: bool) -> None:
        """Pass on the last line if it has no end."""
        if is_last and self._shown_part:
            self._write(self._prefix + self._shown_part + b"\n")
            self._shown_part = b""

    def _show(self, data: bytes) -> None:
        if not self._whole_lines:
            self._write(data)
            return
        whole, end, rest = (self._shown_part + data).rpartition(b"\n")
        if not end and len(rest) > _LONGEST_REPORT:  # binary output, or a bar without line ends
            whole, end, rest = rest, b"\n", b""
        self._shown_part = rest
        if end:
            lines = whole.split(b"\n")
            self._write(b"".join(self._prefix + line + b"\n" for line in lines))

    def _write(self, data: bytes) -> None:
        """Write to this process's stream, until its reader has gone."""
        if self._shown is None:
            return
        try:
            self._shown.write(data)
        except (OSError, ValueError):
            # A script keeps training when nobody reads its output. The log has it.
            self._shown = None


def reported(line: bytes) -> dict[str, Any] | None:
    """Return the entry in `line` if it is a JSON object with a whole number as its step."""
    line = line.strip()
    if not line.startswith(b"{") or len(line) > _LONGEST_REPORT:
        return None
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or type(entry.get("step")) is not int:
        return None
    return entry


class Taker(Protocol):
    """What gets the bytes of a pipe."""

    def take(self, data: bytes, /) -> None: ...
    def look(self, is_last: bool, /) -> None:
        """Do what is due. This is called several times a second, and after the last bytes."""


class Pipes:
    """The named pipes in `folder`, through which the ranks of this machine write.

    At the end of its context, what is left in the pipes is read.
    """

    def __init__(
        self, folder: Path, takers: Mapping[str, Taker], terminals: Mapping[str, int]
    ) -> None:
        """Make a pipe for each key of `takers`: `0.out`, `0.err`, `1.out` and so on.

        For a key of `terminals`, make a terminal that has the size of this one instead.
        """
        self._selector = selectors.DefaultSelector()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._takers = takers.values()
        self._sizes: dict[int, int] = {}  # a terminal for the script, and the one to follow
        self.count = 0  # the number of bytes so far
        for name, taker in takers.items():
            pipe = None
            if name in terminals:
                with suppress(OSError):  # some containers do not have /dev/pts
                    outer, inner = os.openpty()
                    tty.setraw(inner)  # the outer terminal changes line ends
                    (folder / name).symlink_to(os.ttyname(inner))
                    os.set_blocking(outer, False)
                    self._sizes[inner], pipe = terminals[name], outer
            if pipe is None:
                os.mkfifo(folder / name, 0o600)
                # With both ends open, the pipe has no end while no rank writes.
                pipe = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._selector.register(pipe, selectors.EVENT_READ, taker)
        self._follow_sizes()

    def start(self) -> None:
        """Start to read, in a thread."""
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
        for key in list(self._selector.get_map().values()):
            os.close(key.fd)
        for inner in self._sizes:
            os.close(inner)
        self._selector.close()

    def _run(self) -> None:
        while True:
            # The order matters: after the end, one more look finds all that was written before.
            last = self._ended.is_set()
            found = self._selector.select(0 if last else _LOOK_EVERY_S)
            for key, _ in found:
                with suppress(BlockingIOError):
                    data = os.read(key.fd, _READ_BYTES)
                    self.count += len(data)
                    key.data.take(data)
            self._follow_sizes()
            is_last = last and not found
            for taker in self._takers:
                taker.look(is_last)
            if is_last:
                break

    def _follow_sizes(self) -> None:
        for inner, outer in self._sizes.items():
            with suppress(OSError, termios.error):
                termios.tcsetwinsize(inner, termios.tcgetwinsize(outer))
