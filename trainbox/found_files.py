"""Search a folder for files."""

import os
from collections.abc import Iterator
from pathlib import Path

from trainbox.errors import WrongUse

# Folders of file managers and archives, whose pictures are copies in another size, or no pictures.
LEFT_OUT = ("@eadir", "__macosx")


def is_left_out(name: str) -> bool:
    """Return whether a file or a folder is hidden, or one of a file manager or an archive."""
    return name.startswith(".") or name.lower() in LEFT_OUT


def files_in(
    folder: Path, endings: tuple[str, ...], outer: tuple[tuple[int, int], ...] = ()
) -> Iterator[Path]:
    """Yield the files with these endings in `folder` and its folders, in the order of their names.

    Hidden files and the names in `LEFT_OUT` do not count. `endings` are lower-case, as in ".txt".
    Links are followed, but not into a folder that contains the link (`outer`). A link to a missing
    file or to itself is yielded.

    Raises:
        WrongUse: a name with one of the endings is a FIFO, a device or a socket.
    """
    status = folder.stat()
    if not outer:
        above = [path.stat() for path in folder.resolve().parents]
        outer = tuple((each.st_dev, each.st_ino) for each in above)
    outer = (*outer, (status.st_dev, status.st_ino))
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        if is_left_out(entry.name):
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
