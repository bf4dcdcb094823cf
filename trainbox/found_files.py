"""Search a folder for files."""

import os
from collections.abc import Iterator
from pathlib import Path

from trainbox.contract.errors import WrongUse


def files_in(
    folder: Path, endings: tuple[str, ...], outer: tuple[tuple[int, int], ...] = ()
) -> Iterator[Path]:
    """Yield the files with these endings in `folder` and its folders, in the order of their names.

    `endings` are lower-case, as in ".txt". Links are followed, but not into a folder that contains
    the link (`outer`). A link to a missing file or to itself is yielded.

    Raises:
        WrongUse: a name with one of the endings is a FIFO, a device or a socket.
    """
    status = folder.stat()
    outer = (*outer, (status.st_dev, status.st_ino))
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith("."):
            continue
        # `entry` knows the kind without a call of the system, but raises OSError for a link to
        # itself.
        path = Path(entry.path)
        kind = path if entry.is_symlink() else entry
        if kind.is_dir():
            inner = entry.stat()
            if (inner.st_dev, inner.st_ino) not in outer:
                yield from files_in(path, endings, outer)
        elif entry.name.lower().endswith(endings):
            if not kind.is_file() and path.exists():
                raise WrongUse(f"{path} is a FIFO, a device or a socket, not a file: remove it")
            yield path
