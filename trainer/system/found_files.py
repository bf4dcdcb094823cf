"""Find the files in folders."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.errors import WrongUse


def find_files(given: Sequence[Path], endings: tuple[str, ...]) -> list[Path]:
    """Return the files in `given`, and those in its folders with one of the `endings`.

    The files of a folder and of its folders are sorted by name. Links are followed, but not to a
    folder that contains the link. Names that start with a dot are left out. Without `endings`, all
    files are found.

    Raises:
        WrongUse: A path cannot be read, or a folder has no such file, or has a FIFO of that name.
    """
    found: list[Path] = []
    for path in given:
        if not path.is_dir():
            found.append(path)
            continue
        inside = list(_files_in(path, endings or ("",)))
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


def _files_in(
    folder: Path, endings: tuple[str, ...], outer: tuple[tuple[int, int], ...] = ()
) -> Iterator[Path]:
    """Yield the files in `folder` and its folders, in the order of their names.

    `outer` are the folders that contain `folder`. A link to one of them is left out, because the
    search would never end.
    """
    try:
        outer = (*outer, _identity(folder))
        for path in sorted(folder.iterdir()):
            if path.name.startswith("."):
                continue
            if path.is_dir():
                if _identity(path) not in outer:
                    yield from _files_in(path, endings, outer)
            elif path.name.lower().endswith(endings):
                if path.exists() and not path.is_file():
                    raise WrongUse(f"{path} is a FIFO, a device or a socket, not a file: remove it")
                yield path
    except OSError as error:
        raise WrongUse(
            f"{error.filename} cannot be read ({error.strerror}): make it readable, or leave it out"
        ) from error


def _identity(folder: Path) -> tuple[int, int]:
    status = folder.stat()
    return status.st_dev, status.st_ino
