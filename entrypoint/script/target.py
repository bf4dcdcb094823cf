"""The program that `trainbox run` starts: a script, a module or any executable file."""

import ast
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path

from trainbox.contract.errors import WrongUse
from trainbox.contract.hints import nearest


@dataclass(frozen=True)
class Target:
    """What to run.

    Attributes:
        name: the script's path as the user wrote it, or the module's dotted name.
        arguments: the script's own arguments; `{run}` stands for the run folder.
        is_module: whether Python runs it with -m.
        file: the file that is executed.
        is_python: whether Python runs the file.
    """

    name: str
    arguments: tuple[str, ...]
    is_module: bool
    file: Path
    is_python: bool = True

    def command(self, run: Path, python: str = sys.executable) -> list[str]:
        """Return the command of each process; `{run}` in its arguments becomes `run`."""
        arguments = [argument.replace("{run}", str(run)) for argument in self.arguments]
        if not self.is_python:
            return [str(self.file.absolute()), *arguments]
        # -u: the output arrives line by line, and nothing is lost with a killed rank.
        module = ["-m"] if self.is_module else []
        # Python would take a name such as -x.py for an option.
        name = f"./{self.name}" if self.name.startswith("-") else self.name
        return [python, "-u", *module, name, *arguments]

    def run_name(self) -> str:
        """Return the name of the run folder: the same command has the same one."""
        from trainbox.contract.run_name import (
            run_name,  # takes a millisecond, and few commands need it
        )

        return run_name(self.name, self.is_module, self.arguments)


def find_script(name: str, arguments: Sequence[str]) -> Target:
    """Return the target of the script at the path `name`.

    Raises:
        WrongUse: the file does not exist, or it is neither Python nor a program.
    """
    file = Path(name)
    try:
        if file.is_dir():
            raise WrongUse(f"{name} is a folder: name the script in it, or -m MODULE")
        if file.exists() and not file.is_file():
            raise WrongUse(f"{name} is not a regular file: name a Python file or a program")
        with file.open("rb") as opened:
            begin = opened.read(256)
    except OSError as error:
        # An executable program may be unreadable.
        if not (isinstance(error, PermissionError) and os.access(file, os.X_OK)):
            raise WrongUse(
                f"the script {name} cannot be read ({error.strerror}): {_nearest(file)}"
            ) from error
        begin = b""
    first_line = begin.partition(b"\n")[0]
    if file.suffix == ".py" or (first_line[:2] == b"#!" and b"python" in first_line):
        if file.suffix == ".py" or not _is_zip(file):  # Python also runs a zip file
            _check_syntax(name, file)
        return Target(name, tuple(arguments), is_module=False, file=file)
    if os.access(file, os.X_OK):
        return Target(name, tuple(arguments), is_module=False, file=file, is_python=False)
    raise WrongUse(
        f"{name} is neither a Python file (.py) nor executable: rename it, or use chmod +x"
    )


def find_module(name: str, arguments: Sequence[str], search_path: Sequence[str]) -> Target:
    """Return the target of a module; no code of it or of its packages is executed.

    `search_path` has the folders of the user, the current one first.

    Raises:
        WrongUse: the module is not found, or a package has no `__main__`.
    """
    folders: Sequence[str] | None = search_path
    spec = None
    for part in name.split("."):
        spec = PathFinder.find_spec(part, folders) if part and folders else None
        folders = spec.submodule_search_locations if spec else None
    if spec and spec.submodule_search_locations is not None:
        spec = PathFinder.find_spec("__main__", spec.submodule_search_locations)
    if spec is None or spec.origin is None:
        raise WrongUse(
            f"-m {name}: no such module in {search_path[0] or '.'} and in the installed packages "
            "(a package needs a __main__.py): start the command in the folder of the project"
        )
    file = Path(spec.origin)
    if file.suffix == ".py":
        _check_syntax(f"-m {name}", file)
    return Target(name, tuple(arguments), is_module=True, file=file)


def _is_zip(file: Path) -> bool:
    import zipfile  # loads shutil and others, which takes milliseconds

    return zipfile.is_zipfile(file)


def _check_syntax(name: str, file: Path) -> None:
    try:
        ast.parse(file.read_bytes())
    except SyntaxError as error:
        where = f"line {error.lineno}: " if error.lineno else ""
        raise WrongUse(f"{name} is not valid Python ({where}{error.msg}): correct it") from error
    except ValueError as error:  # zero bytes, or an unknown encoding
        raise WrongUse(f"{name} is not valid Python ({error}): correct it") from error
    except OSError as error:
        raise WrongUse(
            f"{name} cannot be read ({error.strerror}): make it readable for this user"
        ) from error


def _nearest(file: Path) -> str:
    """Return a hint with the Python files beside a missing one."""
    try:
        # A link to a missing file is listed, too.
        beside = sorted(other.name for other in file.parent.glob("*.py") if other.is_file())
    except OSError:
        beside = []
    folder = str(file).removesuffix(file.name)
    example = "give the path of a Python file or a program"
    return nearest(file.name, beside, example, prefix=folder)
