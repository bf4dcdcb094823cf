"""The files that a command is given."""

from collections.abc import Sequence
from pathlib import Path

from trainbox.contract.errors import WrongUse
from trainbox.found_files import files_in


def given_files(given: Sequence[Path], endings: tuple[str, ...]) -> list[Path]:
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
        try:
            inside = list(files_in(path, endings or ("",)))
        except OSError as error:
            raise WrongUse(
                f"{error.filename} cannot be read ({error.strerror}): make it readable, or leave "
                "it out"
            ) from error
        if not inside:
            of_the_task = f" ({', '.join(endings)})" if endings else ""
            raise WrongUse(f"{path} has no file for this task{of_the_task}: name another folder")
        found += inside
    return found
