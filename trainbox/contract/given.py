"""The folder of a run and the files that a command is given."""

import difflib
from collections.abc import Sequence
from pathlib import Path

from trainbox.contract.errors import WrongUse


def check_folder(command: str, run: Path) -> None:
    """Raise WrongUse if the folder `run` does not exist, with the name of the nearest one."""
    if not run.is_dir():
        raise WrongUse(f"{command} {run}: {_missing(run)}")


def check_run(command: str, run: Path, *others: str) -> None:
    """Raise WrongUse if `run` is not the folder of a run, or lacks one of the files `others`."""
    check_folder(command, run)
    for name in ("config.json", "manifest.json", *others):
        if not (run / name).is_file():
            raise WrongUse(
                f"{command} {run}: {name} is missing: give the folder of a run, such as "
                "runs/digits-7d2c1a90"
            )


def _missing(run: Path) -> str:
    try:
        folders = sorted(path.name for path in run.parent.iterdir() if path.is_dir())
    except OSError:
        folders = []
    near = [folder for folder in folders if folder.startswith(run.name)]
    near = near or difflib.get_close_matches(run.name, folders, n=1)
    if not near:
        return "the folder does not exist: give the folder of a run, such as runs/digits-7d2c1a90"
    names = " or ".join(str(run.parent / folder) for folder in near[:3])
    return f"the folder does not exist: did you mean {names}?"


def check_files(given: Sequence[Path]) -> None:
    """Raise WrongUse if a path is neither a file nor a folder."""
    for path in given:
        try:
            problem = "is not a file or folder" if path.exists() else "does not exist"
            usable = path.is_file() or path.is_dir()
        except OSError as error:
            problem, usable = f"cannot be read ({error.strerror})", False
        if not usable:
            raise WrongUse(f"{path} {problem}: name files, or folders of files")
