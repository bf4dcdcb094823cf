"""Explain why a file or folder cannot be written, and how to fix it."""

import contextlib
import errno
import os
import pwd
import resource
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from trainbox.disclosure.suggested_commands import from_here, runs_dir
from trainbox.errors import Failure, StorageFailure, WrongUse
from trainbox.processes.streams import discard

_ENOUGH_FILES = 2**16


def storage_failure(
    path: Path, error: OSError, needed_bytes: int = 0, instead: str | None = None
) -> Failure:
    """Return the failure for `error`, which was raised while writing to `path` or below it.

    The message has a remedy for the cause. `needed_bytes` is the size of a checkpoint, or 0 for
    another file. `instead` is how to choose another folder, by default another folder for the runs.
    Too many open files are `too_many_files`, whatever was opened.
    """
    if error.errno == errno.EMFILE:
        return too_many_files()
    if isinstance(error.filename, str | bytes):
        path = Path(os.fsdecode(error.filename))
    # For a path in a folder of another user, `Path.exists` may raise an error instead.
    existing = next(filter(os.path.exists, [path, *path.parents]), Path("/"))
    reason = error.strerror or f"{error}"
    if error.errno in (errno.EACCES, errno.EPERM):
        detail, remedy = _permission_remedy(existing)
    elif error.errno == errno.ENOSPC:
        detail, remedy = _space_remedy(existing, needed_bytes)
    elif error.errno == errno.EFBIG:
        detail, remedy = _mib(needed_bytes), "raise the limit of a file's size (`ulimit -f`)"
    else:
        detail, remedy = _OTHERS.get(error.errno or 0, ("", ""))
    return StorageFailure(
        f"cannot write {path}: {reason}{detail and f' ({detail})'}: {remedy and f'{remedy}, or '}"
        f"{instead or f'choose another folder with {runs_dir()}'}"
        f"{'; earlier checkpoints are intact' if needed_bytes else ''}"
    )


def too_many_files(otherwise: str = "") -> WrongUse:
    """Return the failure for a process that may not open another file.

    `otherwise` has other cures, after a comma.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return WrongUse(
        f"this process needs more than {limit} open files, which is its limit: raise the limit "
        f"with `ulimit -n {max(_ENOUGH_FILES, 4 * limit)}` (Docker: --ulimit nofile=...){otherwise}"
    )


@contextlib.contextmanager
def writing(path: Path, instead: str | None = None) -> Iterator[None]:
    """Raise an error of the system in the body as `storage_failure` for `path`."""
    try:
        yield
    except BrokenPipeError:
        raise  # the reader needs no more rows
    except OSError as error:
        raise storage_failure(path, error, instead=instead) from error


def show(text: str, end: str = "\n", output: TextIO | None = None) -> None:
    """Print a result on standard output, or on `output`, which was standard output before.

    Raises:
        StorageFailure: it is a file on a full disk.
        BrokenPipeError: its reader needs no more rows.
    """
    output = output or sys.stdout
    with writing(Path("/dev/stdout"), "write it to another disk"):
        try:
            output.write(f"{text}{end}")
            output.flush()
        except OSError:
            discard(output.fileno())  # Python writes what the stream still has at its end
            raise


_SPARE_BYTES = 2**24  # with more free bytes than this, the space was not the cause


def disk_is_full(error: BaseException) -> bool:
    """Return whether `error` means that a disk or a quota is used up."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


def is_of_disk(error: BaseException, folder: Path) -> bool:
    """Return whether `error` was raised by the disk of `folder`, and not by another file."""
    if not isinstance(error, OSError):
        return False
    inside = isinstance(error.filename, str) and Path(error.filename).is_relative_to(folder)
    return inside or disk_is_full(error) or error.errno == errno.EROFS


# The details and the remedies of all other errors.
_OTHERS = {
    errno.ENOENT: ("its folder is missing", "make it, and keep it while a program writes there"),
    errno.EROFS: ("", "mount the file system for writing"),
    errno.EDQUOT: ("your disk quota is used up: see `quota -s`", "delete some of your files"),
    errno.EIO: ("the disk reports an error: see `dmesg`", ""),
    errno.ENAMETOOLONG: ("", "choose a shorter name with --run"),
    errno.ENOTDIR: ("a file is where a folder is needed", "remove that file"),
    errno.EEXIST: ("a file is where a folder is needed", "remove that file"),
    errno.ENXIO: ("a FIFO or a device is where a file is needed", "remove that"),
    errno.ELOOP: ("a symbolic link is where a file is needed", "remove the link"),
    errno.EISDIR: ("a folder is where a file is needed", "remove that folder"),
}


def _permission_remedy(existing: Path) -> tuple[str, str]:
    """Return who owns the path `existing`, and a command that lets this user write there."""
    uid, gid, owner = os.geteuid(), os.getegid(), existing.stat().st_uid
    detail = f"{existing} belongs to {_user(owner)}, and this process runs as {_user(uid)}"
    # One command for all that belongs to the owner here, such as the folder of all runs.
    top = Path(from_here(existing))
    while not top.is_absolute() and top.parent != Path() and top.parent.stat().st_uid == owner:
        top = top.parent
    if owner == uid:
        return detail, f"allow writing with `chmod -R u+rwX {top}`"
    # On network file systems, root cannot write to other users' files. Neither can it in our
    # containers, where the command is for the host.
    if uid == 0 and not os.environ.get("TRAINBOX_COMMAND"):
        return detail, f"run as {_user(owner)}"
    return detail, f"take the folder over with `sudo chown -R {uid}:{gid} {top}`"


def _space_remedy(existing: Path, needed_bytes: int) -> tuple[str, str]:
    """Return the free space of the file system of `existing`, and the remedy."""
    found = os.statvfs(existing)
    if found.f_files and not found.f_favail:
        return "no inodes left", "delete some files"
    needed = f"{_mib(needed_bytes)}, " if needed_bytes else ""
    free_bytes = shutil.disk_usage(existing).free
    detail = f"{needed}{free_bytes // 2**20} MiB free"
    # Temporary files are removed before this, so what was used up may be free again.
    if free_bytes > 2 * needed_bytes + _SPARE_BYTES:
        detail += ", but no inodes or quota left: see `df -i` and `quota -s`"
        return detail, "delete some files"
    return detail, "free some space"


def _mib(needed_bytes: int) -> str:
    return f"{-(-needed_bytes // 2**20)} MiB needed" if needed_bytes else ""


def _user(uid: int) -> str:
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"
