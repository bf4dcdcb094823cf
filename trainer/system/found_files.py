"""Find the files in folders."""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.errors import WrongUse


def find_files(given: Sequence[Path], endings: tuple[str, ...]) -> list[Path]:
    """Return the files in `given`, and those in its folders with one of the `endings`.

    The files of a folder and of its folders are sorted by name. Links are followed. Names that
    start with a dot are left out. Without `endings`, all files are found.

    Raises:
        WrongUse: A path does not exist or cannot be read, or a folder has no such file.
    """
    found: list[Path] = []
    for path in given:
        if not path.is_dir():
            found.append(path)
            continue
        inside = sorted(_files_in(path, endings or ("",)))
        if not inside:
            of_the_task = f" ({', '.join(endings)})" if endings else ""
            raise WrongUse(f"{path} has no file for this task{of_the_task}: name another folder")
        found += inside
    return found


def check_files(given: Sequence[Path]) -> None:
    """Raise WrongUse if a path is neither a file nor a folder."""
    for path in given:
        if not path.is_file() and not path.is_dir():
            problem = "is not a file or folder" if path.exists() else "does not exist"
            raise WrongUse(f"{path} {problem}: name files, or folders of files")


def _files_in(folder: Path, endings: tuple[str, ...]) -> Iterator[Path]:
    seen = set()
    for place, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        # A folder that contains a link to itself is read once.
        status = Path(place).stat()
        if (status.st_dev, status.st_ino) in seen:
            folders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in names:
            if not name.startswith(".") and name.lower().endswith(endings):
                yield Path(place, name)


def _refuse(error: OSError) -> None:
    raise WrongUse(
        f"{error.filename} cannot be read ({error.strerror}): make it readable, or leave it out"
    ) from error
