"""Temporary folders with a lock that shows whether their owner is alive.

The next start removes the folders of killed processes.
"""

import contextlib
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from trainbox.errors import StorageFailure
from trainbox.files.regular_files import take_lock

_PREFIX = "trainbox-"
# Locked as long as the owner or a fork of it is alive. Unlike a process ID, a lock is visible in
# other containers that share /tmp.
_OWNER = ".owner"


@contextlib.contextmanager
def temporary_folder(purpose: str = "") -> Iterator[Path]:
    """Remove the folders of killed processes, and yield a new folder `trainbox-PURPOSE...`.

    The new folder is removed at the end unless `keep` was called, and so are the folders of
    processes that were killed meanwhile.

    Raises:
        StorageFailure: the folder cannot be made.
    """
    try:
        folder, lock = _make(purpose)
    except OSError as error:
        raise StorageFailure(
            f"a temporary folder cannot be made ({error.strerror or error}): give the container "
            "one, as in --tmpfs /tmp, or set TMPDIR"
        ) from error
    try:
        yield folder
    finally:
        if any(folder.glob(f"{_OWNER}*")):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        remove_abandoned()


def keep(folder: Path) -> None:
    """Keep a temporary folder after its owner ends, so that the user can look into it."""
    for name in (_OWNER, f"{_OWNER}.new"):
        (folder / name).unlink(missing_ok=True)


@contextlib.contextmanager
def sockets_in_a_folder() -> Iterator[None]:
    """Keep the sockets of loader workers in a temporary folder of ours.

    The folder `pymp-...` of multiprocessing is never removed if its process is killed.
    """
    import multiprocessing  # takes milliseconds, and a launcher has no loader workers

    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = settings.get("tempdir")
    try:
        folder, lock = _make("")
    except OSError:
        # A container whose /tmp is not writable can still train, if no worker needs a socket.
        yield
        return
    settings["tempdir"] = str(folder)
    try:
        yield
    finally:
        settings["tempdir"] = before
        # After an error, a worker may still be alive. It holds the lock until it ends, and the next
        # start removes the folder.
        if not multiprocessing.active_children():
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def _make(purpose: str) -> tuple[Path, int]:
    """Make a locked folder, and return it with the descriptor of its lock."""
    remove_abandoned()
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX + purpose))
    return folder, _claim(folder)


def remove_abandoned() -> None:
    """Remove this user's temporary folders whose owner is dead."""
    with contextlib.suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                if (
                    entry.name.startswith(_PREFIX)
                    and entry.is_dir(follow_symlinks=False)
                    and entry.stat(follow_symlinks=False).st_uid == os.getuid()
                ):
                    _remove_if_abandoned(Path(entry.path))


def _remove_if_abandoned(folder: Path) -> None:
    lock = os.open(folder / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(os.fstat(lock).st_mode) and take_lock(lock, without_locks=False):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _claim(folder: Path) -> int:
    """Lock the folder's owner file, and return the descriptor of the lock.

    The file is locked before it gets its name, so that no process takes the folder for abandoned.
    """
    unnamed = folder / f"{_OWNER}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # If the file system has no locks, the folder is never considered abandoned.
    if take_lock(lock, without_locks=False):
        unnamed.rename(folder / _OWNER)
    return lock
