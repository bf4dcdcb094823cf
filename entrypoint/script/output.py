"""The output of a script's ranks: to this process's streams, and to one log for each rank."""

import errno
import os
import selectors
import termios
import threading
import tty
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from trainbox.files.entries import parsed, step_of
from trainbox.files.regular_files import append_regular
from trainbox.folders.write_failures import writing
from trainbox.processes.streams import message

# A log is replaced by an empty one at this size, and the one before it is kept as NAME.1.log.
LOG_BYTES = 64 * 2**20
_READ_BYTES = 2**16
_LONGEST_LINE = 2**16
_LOOK_EVERY_S = 0.2


class Log:
    """A log file of bounded size: at most twice `limit` bytes, of which the newest stay."""

    def __init__(self, path: Path, limit: int = LOG_BYTES) -> None:
        """Open the log to append.

        Raises:
            StorageFailure: the file cannot be opened.
        """
        self.path, self._limit = path, limit
        with writing(path):
            self._file = append_regular(path)
        self._has_lost = False

    def write(self, data: bytes) -> None:
        """Append `data`. If this fails, print it once, and write nothing more."""
        if self._has_lost:
            return
        try:
            if os.fstat(self._file.fileno()).st_size + len(data) > self._limit:
                self._file.close()
                self.path.replace(self.path.with_suffix(".1.log"))
                self._file = append_regular(self.path)
            if os.write(self._file.fileno(), data) < len(data):  # the rest did not fit on the disk
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            self._has_lost = True
            message(f"{self.path} cannot be written ({error.strerror}): it is not complete")

    def close(self) -> None:
        self._file.close()


class Stream:
    """One stream of one rank: passes its bytes on, by whole lines or at once."""

    def __init__(
        self,
        log: Log,
        show: Callable[[bytes], object] | None,
        prefix: bytes = b"",
        whole_lines: bool = True,
        report: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:
        """Pass bytes on to `show`, each line after `prefix`.

        Without `whole_lines`, bytes are passed on at once, so that a progress bar moves. `report`
        gets each line that is a JSON object with a step.
        """
        self._log, self._show, self._prefix = log, show, prefix
        self._whole_lines, self._report = whole_lines, report
        self._line, self._is_rest = b"", False

    def take(self, data: bytes) -> None:
        """Take new bytes of the rank."""
        self._log.write(data)
        if not self._whole_lines:
            self._pass_on(data)
        *lines, self._line = (self._line + data).split(b"\n")
        self._take_lines(lines)
        if len(self._line) > _LONGEST_LINE:  # binary output, or a bar without line ends
            self._pass_on_lines([self._line])
            self._line, self._is_rest = b"", True

    def close(self) -> None:
        """Take the last line if it has no end."""
        self._take_lines([self._line] if self._line else [])

    def _take_lines(self, lines: list[bytes]) -> None:
        if self._report is not None:
            for line in lines[self._is_rest :]:  # the end of a long line is not a report
                if (entry := reported(line)) is not None:
                    self._report(entry)
        self._is_rest = self._is_rest and not lines
        self._pass_on_lines(lines)

    def _pass_on_lines(self, lines: list[bytes]) -> None:
        if self._whole_lines and lines:
            self._pass_on(b"".join(self._prefix + line + b"\n" for line in lines))

    def _pass_on(self, data: bytes) -> None:
        """Write to this process's stream, until its reader has gone."""
        try:
            if self._show is not None:
                self._show(data)
        except OSError:
            # A script keeps training when nobody reads its output. The log has it.
            self._show = None


def reported(line: bytes) -> dict[str, Any] | None:
    """Return the entry in `line` if it is a JSON object with a whole number as its step."""
    line = line.strip()
    entry = parsed(line) if line.startswith(b"{") and len(line) <= _LONGEST_LINE else None
    return entry if entry is not None and step_of(entry) is not None else None


class Pipes:
    """The named pipes in `folder`, through which the ranks of this machine write.

    At the end of its context, what is left in the pipes is read.
    """

    def __init__(
        self,
        folder: Path,
        takers: Mapping[str, Callable[[bytes], object]],
        terminals: Mapping[str, int],
    ) -> None:
        """Make a pipe for each key of `takers`, such as `0.err`. Its value gets the bytes.

        For a key of `terminals`, make a terminal that has the size of this one instead.
        """
        self._selector = selectors.DefaultSelector()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="output", daemon=True)
        self._sizes: dict[int, int] = {}  # a terminal for the script, and the one to follow
        self.count = 0  # the number of bytes so far
        for name, take in takers.items():
            pipe = None
            if name in terminals:
                with suppress(OSError):  # some containers do not have /dev/pts
                    end, inner = os.openpty()
                    tty.setraw(inner)  # the outer terminal changes line ends
                    (folder / name).symlink_to(os.ttyname(inner))
                    os.set_blocking(end, False)
                    self._sizes[inner], pipe = terminals[name], end
            if pipe is None:
                os.mkfifo(folder / name, 0o600)
                # With both ends open, the pipe has no end while no rank writes.
                pipe = os.open(folder / name, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
            self._selector.register(pipe, selectors.EVENT_READ, take)
        self._follow_sizes()

    def start(self) -> None:
        """Start to read, in a thread."""
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join()
        pipes = [key.fd for key in self._selector.get_map().values()]
        for descriptor in (*pipes, *self._sizes):
            os.close(descriptor)
        self._selector.close()

    def _run(self) -> None:
        found, is_last = False, False
        while found or not is_last:
            # The order matters: after the end, one more look finds all that was written before.
            is_last = self._ended.is_set()
            events = self._selector.select(0 if is_last else _LOOK_EVERY_S)
            for key, _ in events:
                with suppress(BlockingIOError):
                    data = os.read(key.fd, _READ_BYTES)
                    self.count += len(data)
                    key.data(data)
            found = bool(events)
            self._follow_sizes()

    def _follow_sizes(self) -> None:
        for inner, outer in self._sizes.items():
            with suppress(OSError, termios.error):
                termios.tcsetwinsize(inner, termios.tcgetwinsize(outer))
