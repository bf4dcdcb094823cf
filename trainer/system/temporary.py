"""Temporary folders that name their owner by a lock, so that those of killed processes can be
removed at the next start.

entrypoint/system/temporary.py makes its folders in the same way; only the trainer removes them.
"""

import contextlib
import fcntl
import multiprocessing
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

_PREFIX = "trainbox-"
# Locked as long as the owner or a fork of it lives. Unlike a process's number, a lock is also seen
# from another container that shares /tmp.
_OWNER = ".owner"


@contextlib.contextmanager
def temporary_folder(purpose: str = "") -> Iterator[Path]:
    """Make a folder `trainbox-PURPOSE...` that is removed at the end, after removing those of
    killed processes.
    """
    folder, lock = _make(purpose)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextlib.contextmanager
def sockets_in_a_folder() -> Iterator[None]:
    """Keep the sockets of loader workers in a temporary folder of ours: multiprocessing's `pymp-`
    outlives a kill.
    """
    settings = multiprocessing.current_process()._config  # type: ignore[attr-defined]
    before = settings.get("tempdir")
    try:
        folder, lock = _make("")
    except OSError:
        # A container whose /tmp is not writable can train, as long as nothing needs a socket.
        yield
        return
    settings["tempdir"] = str(folder)
    try:
        yield
    finally:
        settings["tempdir"] = before
        # A worker that is still alive, after an error, removes its own socket. It holds the lock
        # until it has ended, and the folder is left to the next start.
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
                    and _is_ours(entry)
                ):
                    _remove_if_abandoned(Path(entry.path))


def _is_ours(entry: "os.DirEntry[str]") -> bool:
    return entry.stat(follow_symlinks=False).st_uid == os.getuid()


def _remove_if_abandoned(folder: Path) -> None:
    lock = os.open(folder / _OWNER, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if stat.S_ISREG(os.fstat(lock).st_mode):
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(lock)


def _claim(folder: Path) -> int:
    """Lock the folder's owner file before it has its name, so that nobody takes a new folder for an
    abandoned one.
    """
    unnamed = folder / f"{_OWNER}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    # a file system without locks: the folder is then left alone for ever
    with contextlib.suppress(OSError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        unnamed.rename(folder / _OWNER)
    return lock
