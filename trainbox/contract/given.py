"""The folder of a run and the files that a command is given."""

from collections.abc import Sequence
from pathlib import Path

from trainbox.contract.errors import WrongUse
from trainbox.contract.files import open_regular
from trainbox.contract.hints import nearest


def check_folder(command: str, run: Path) -> None:
    """Raise WrongUse if the folder `run` does not exist, with the name of the nearest one."""
    if not run.is_dir():
        raise WrongUse(f"{command} {run}: {_missing(run)}")


def check_run(command: str, run: Path, *others: str) -> None:
    """Raise WrongUse if `run` is not the folder of a run, or one of its files cannot be read."""
    check_folder(command, run)
    for name in ("config.json", "manifest.json", *others):
        try:
            open_regular(run / name).close()
        except OSError as error:
            raise WrongUse(
                f"{command} {run}: {name} cannot be read ({error.strerror}): give the folder of a "
                "run, such as runs/digits-7d2c1a90"
            ) from error


def _missing(run: Path) -> str:
    try:
        folders = sorted(path.name for path in run.parent.iterdir() if path.is_dir())
    except OSError:
        folders = []
    begun = [folder for folder in folders if folder.startswith(run.name)]
    example = "give the folder of a run, such as runs/digits-7d2c1a90"
    prefix = str(run).removesuffix(run.name)
    names = " or ".join(prefix + folder for folder in begun[:3])
    fix = f"did you mean {names}?" if begun else nearest(run.name, folders, example, prefix=prefix)
    return f"the folder does not exist: {fix}"


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
