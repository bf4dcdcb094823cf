"""Temporary folders whose owner holds a lock in them.

trainer/system/temporary.py makes its folders in the same way. It removes the folders of both
packages whose owner is dead.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from entrypoint.errors import NotWritable

_OWNER = ".owner"


@contextlib.contextmanager
def temporary_folder(purpose: str) -> Iterator[Path]:
    """Make a folder `trainbox-PURPOSE...`, and remove it at the end unless `keep` was called.

    If this process is killed, a later training removes the folder.

    Raises:
        NotWritable: the folder cannot be made.
    """
    try:
        folder = Path(tempfile.mkdtemp(prefix=f"trainbox-{purpose}"))
    except OSError as error:
        raise NotWritable(
            f"a temporary folder cannot be made ({error.strerror or error}): give the container "
            "one, as in --tmpfs /tmp, or set TMPDIR"
        ) from error
    # Take the lock before the file gets its name. Otherwise, another process could see the new
    # folder without a lock and remove it.
    unnamed = folder / f"{_OWNER}.new"
    lock = os.open(unnamed, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        # On a file system without locks, the folder stays after a kill.
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            unnamed.rename(folder / _OWNER)
        yield folder
    finally:
        if any(folder.glob(f"{_OWNER}*")):
            shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def keep(folder: Path) -> None:
    """Keep a temporary folder after its owner ends, so that the user can look into it."""
    for name in (_OWNER, f"{_OWNER}.new"):
        (folder / name).unlink(missing_ok=True)
