"""Temporary folders whose owner holds a lock in them.

trainer/system/temporary.py makes its folders in the same way, and removes those of both when their
owner is dead.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from entrypoint.errors import NoPlace

_OWNER = ".owner"


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Make a folder `trainbox-PURPOSE...` that is removed at the end, or by a training that is
    started after a kill.

    After `keep` it stays.

    Raises:
        NoPlace: there is no place for one.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"trainbox-{purpose}"))
    except OSError as error:
        raise NoPlace(
            f"no temporary folder can be made ({error.strerror or error}): give the "
            "container one, as in --tmpfs /tmp, or "
            "set TMPDIR"
        ) from error
    # The lock is taken before the file has its name: nobody may take a new folder for an abandoned
    # one.
    unnamed = folder / f"{_OWNER}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # a file system without locks: after a kill the folder stays
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(folder / _OWNER)
        yield folder
    finally:
        if any(folder.glob(f"{_OWNER}*")):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def keep(folder: Path) -> None:
    """Let a temporary folder outlive its owner, for somebody to look into."""
    for name in (_OWNER, f"{_OWNER}.new"):
        (folder / name).unlink(missing_ok=True)
