"""The program that `trainbox run` starts: a script, a module or any executable file."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from entrypoint.script.python import Python, choose_python
from trainbox.disclosure.suggested_commands import command, nearest
from trainbox.errors import WrongUse
from trainbox.files.regular_files import open_regular

# Programs that start a script, as `trainbox run` does.
_STARTERS = re.compile(r"(?:python|pypy)[\d.]*|torchrun|bash|sh|zsh")
_LOOKS_LIKE_A_SCRIPT = re.compile(r"^[^-].*\.(?:py|sh|pyz)$|^[^-].*/")


@dataclass(frozen=True)
class Target:
    """What to run.

    Attributes:
        name: the script's path as the user wrote it, or the module's dotted name.
        arguments: the script's own arguments; `{run}` stands for the run folder.
        is_module: whether Python runs it with -m.
        python: what runs the script; None for another program.
    """

    name: str
    arguments: tuple[str, ...]
    is_module: bool = False
    python: Python | None = Python()  # noqa: RUF009 - it is frozen

    @property
    def folder(self) -> Path:
        """Return the folder of the script, or for a module the current one."""
        return Path.cwd() if self.is_module else Path(self.name).absolute().parent

    @property
    def has_our_python(self) -> bool:
        """Return whether Trainbox's own Python runs the target, and so also its torch."""
        return self.python is not None and self.python.is_ours

    def command(self, run: Path) -> list[str]:
        """Return the command of each process; `{run}` in its arguments becomes `run`."""
        arguments = [argument.replace("{run}", str(run)) for argument in self.arguments]
        if self.python is None:
            return [str(Path(self.name).absolute()), *arguments]
        # -u: the output arrives line by line, and nothing is lost with a killed rank.
        module = ["-m"] if self.is_module else []
        # Python would take a name such as -x.py for an option.
        name = f"./{self.name}" if self.name.startswith("-") else self.name
        return [*self.python.command, "-u", *module, name, *arguments]

    def run_name(self) -> str:
        """Return the name of the run folder: the same command has the same one."""
        # This import takes a millisecond, and few commands need it.
        from trainbox.options.run_name import run_name

        return run_name(self.name, self.is_module, self.arguments)


def find_script(
    name: str, arguments: Sequence[str], python: str | None, env: Mapping[str, str]
) -> Target:
    """Return the target of the script at the path `name`.

    Raises:
        WrongUse: the file does not exist, or it is neither Python nor a program, or the program
            that runs it does not exist.
    """
    file = Path(name)
    try:
        with open_regular(file) as opened:
            begin = opened.read(256)
    except OSError as error:
        # An executable program may be unreadable.
        if not (isinstance(error, PermissionError) and os.access(file, os.X_OK)):
            cure = without_starter(name, arguments) or _other_verb(name, arguments)
            raise WrongUse(
                f"the script {name} cannot be read ({error.strerror}): {cure or _nearest(file)}"
            ) from error
        begin = b""
    first_line = begin.partition(b"\n")[0].decode(errors="replace")
    is_python = file.suffix == ".py" or (first_line[:2] == "#!" and "python" in first_line)
    if is_python or python is not None:
        return Target(name, tuple(arguments), False, choose_python(python, first_line, env))
    if first_line.startswith("#!") and first_line.endswith("\r"):
        raise WrongUse(
            f"the first line of {name} has a Windows line end, with which no program is found: "
            f"write the file without, with `sed -i 's/\\r$//' {shlex.quote(name)}`"
        )
    if os.access(file, os.X_OK):
        return Target(name, tuple(arguments), False, None)
    if file.suffix == ".ipynb":
        raise WrongUse(
            f"{name} is a notebook: make a script of it with `jupyter nbconvert --to script {name}`"
        )
    raise WrongUse(
        f"{name} is neither a Python file (.py) nor executable: rename it, or use chmod +x"
    )


def without_starter(name: str, arguments: Sequence[str]) -> str:
    """Return the command without a program that starts scripts, such as python, or "".

    Folders with a `__main__.py` are started by this file, as Python does.
    """
    if (Path(name) / "__main__.py").is_file():
        dashes = ["--"] if arguments else []
        return f"use `{command('run', shlex.join([f'{name}/__main__.py', *dashes, *arguments]))}`"
    if not _STARTERS.fullmatch(name):
        return ""
    number = re.search(r"--nproc.per.node[= ](\d+)", " ".join(arguments))
    own = ["--gpus", number[1]] if name == "torchrun" and number else []
    # The options of the starter, and their values, come before the script.
    while arguments and arguments[0] != "-m" and not _LOOKS_LIKE_A_SCRIPT.search(arguments[0]):
        arguments = arguments[1:]
    count = 2 if arguments[:1] == ["-m"] else 1
    script, rest = arguments[:count], arguments[count:]
    line = shlex.join([*own, *(script or ["train.py"]), *(["--", *rest] if rest else [])])
    needs = ""
    if name.endswith("sh"):
        needs = f", after `chmod +x {script[0] if script else 'run.sh'}` and with the first line "
        needs += f"#!/bin/{name}"
    return f"leave out {name}: `{command('run', line)}`{needs}"


def _other_verb(name: str, arguments: Sequence[str]) -> str:
    """Return the command for a task, or for a command line in quotes, or ""."""
    from trainbox.task_names.task_spec import is_task

    if " " in name and not arguments:
        words = shlex.split(name) if name.count("'") % 2 == name.count('"') % 2 == 0 else []
        return without_starter(words[0], words[1:]) if words else ""
    if is_task(name):
        return f"it is a task: `{command('train', shlex.join([name, *arguments]))}`"
    return ""


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
