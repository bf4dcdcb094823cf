"""Read and replace the files of a run's folder.

Other programs may have changed them. So only regular files up to a size are read, as UTF-8. A file
to write must not be a symbolic link: the lines would be in another file. The folder itself may be a
link.
"""

import contextlib
import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, TextIO

from trainbox.files.parsing import parse_object

_MOST_BYTES = 2**30  # more than a year of metrics; a sparse file must not fill the memory
_MOST_OBJECT_BYTES = 2**26
_SMALL_BYTES = 2**14
_APPEND = os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
# The errors of a path that is a link, or not a regular file.
OF_ANOTHER_KIND = (errno.ELOOP, errno.ENXIO)


def open_regular(path: Path) -> BufferedReader:
    """Open a regular file, or a link to one, for reading.

    Opening a FIFO would block.

    Raises:
        OSError: the file is missing, unreadable or not a regular file.
    """
    return os.fdopen(_open(path, os.O_RDONLY), "rb")


def open_from(path: Path, begin: int = 0, most_bytes: int = 2**63) -> BufferedReader:
    """Open a file that grows at byte `begin`, or later if more than `most_bytes` bytes follow.

    A file that is shorter than `begin` was replaced, and is read from its start.

    Raises:
        OSError: the file is missing, unreadable or not a regular file.
    """
    file = open_regular(path)
    size = file.seek(0, os.SEEK_END)
    file.seek(max(begin if begin <= size else 0, size - most_bytes))
    return file


def append_regular(path: Path) -> TextIO:
    """Open a regular file to append lines, and create it if it is missing.

    Each line is written immediately.

    Raises:
        OSError: the file is not writable, a link, or not a regular file.
    """
    descriptor = _open(path, os.O_WRONLY | _APPEND)
    return os.fdopen(descriptor, "a", buffering=1, encoding="utf-8", errors="backslashreplace")


def create_regular(path: Path) -> int:
    """Create a file to write, and return its descriptor. Of several processes, one succeeds.

    Raises:
        FileExistsError: there is a file, a folder or a link at the path.
        OSError: the file cannot be created.
    """
    return _open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)


def open_to_change(path: Path) -> int:
    """Open a regular file, and return its descriptor for reading and writing.

    Raises:
        OSError: the file is missing, not writable, a link, or not a regular file.
    """
    return _open(path, os.O_RDWR | os.O_NOFOLLOW)


def _open(path: Path, flags: int) -> int:
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC, 0o666)
    except OSError as error:
        if error.errno != errno.ENXIO:  # a FIFO without a reader, opened for writing
            raise
        raise OSError(errno.ENXIO, "not a regular file", str(path)) from error
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.ENXIO, "not a regular file", str(path))


def take_lock(file: int | IO[Any], posix: bool = False, without_locks: bool = True) -> bool:
    """Lock `file` until it is closed, and return whether no other process has locked it.

    Children of this process do not inherit a `posix` lock. The result is `without_locks` if the
    file system does not have locks, such as Lustre without its option `flock`.
    """
    try:
        (fcntl.lockf if posix else fcntl.flock)(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return False
    except OSError:
        return without_locks
    return True


def read_text(path: Path, most_bytes: int = _MOST_BYTES) -> str:
    """Return the file's text.

    Raises:
        OSError: the file is missing, unreadable or not a regular file.
        ValueError: the file is not UTF-8, or has more than `most_bytes` bytes.
    """
    return read_bytes(path, most_bytes).decode()


def read_bytes(path: Path, most_bytes: int = _MOST_BYTES) -> bytes:
    """Return the file's bytes.

    Raises:
        OSError: the file is missing, unreadable or not a regular file.
        ValueError: the file has more than `most_bytes` bytes.
    """
    with open_regular(path) as file:
        # A file in /proc has the size 0. A read of `most_bytes` would reserve as much memory.
        small = file.read(_SMALL_BYTES)
        data = small if len(small) < _SMALL_BYTES else small + file.read(most_bytes + 1)
    if len(data) > most_bytes:
        raise ValueError(f"more than {most_bytes} bytes")
    return data


def read_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in the file.

    Raises:
        OSError: the file is missing, unreadable or not a regular file.
        ValueError: the file is not UTF-8, or does not contain a JSON object.
    """
    return parse_object(read_text(path, _MOST_OBJECT_BYTES))


def object_if_valid(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in the file, or None if the file is missing or damaged."""
    try:
        return read_object(path)
    except (OSError, ValueError):
        return None


@contextlib.contextmanager
def replacing(path: Path, durable: bool = True) -> Iterator[IO[bytes]]:
    """Yield a new file that atomically replaces `path`, if `durable` once it is on the disk.

    If the body raises an error, `path` is unchanged.
    """
    temporary = path.with_name(path.name + ".tmp")
    temporary.unlink(missing_ok=True)
    try:
        with temporary.open("xb") as file:  # x refuses a link and a FIFO
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if durable:
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def append_line(path: Path, line: str, durable: bool = False) -> None:
    """Append `line` and a line break to a regular file in one write.

    Lines that several processes append are not mixed. A `durable` line is on the disk when this
    function returns. A line that a killed process has left without its end is ended first.

    Raises:
        OSError: the file is not writable, a link, or not a regular file, or the disk is full.
    """
    data = f"{line}\n".encode(errors="backslashreplace")
    descriptor = _open(path, os.O_RDWR | _APPEND)
    try:
        with _locked(descriptor):
            size = os.fstat(descriptor).st_size
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                data = b"\n" + data
            if os.write(descriptor, data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        if durable:
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Lock the file, because a line that another process is writing looks like one without end.

    The file is unlocked and not only closed: a process that another thread has forked meanwhile,
    such as a loader worker, has the descriptor too, and would keep the lock.
    """
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)
