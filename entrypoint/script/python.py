"""The Python that runs a user's script, and what is installed there."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from trainbox.disclosure.suggested_commands import command
from trainbox.errors import WrongUse
from trainbox.processes.environment import user_environment, user_folders

_ASK_S = 30.0
# A Python from 3.8 executes this. It does not import importlib.metadata, which takes as long as the
# rest of a start: the folder of an installed package has its name and version.
_ASK = """
import ast, json, os, sys
packages, error, defined = {}, None, []
def runs(node):
    if isinstance(node, ast.FunctionDef):
        return bool(node.decorator_list)  # which may call it
    if isinstance(node, (ast.Expr, ast.Assign, ast.AnnAssign)):
        return any(isinstance(part, ast.Call) for part in ast.walk(node))
    return not isinstance(node, (ast.Import, ast.ImportFrom, ast.ClassDef))
searched = sys.argv[1].split(os.pathsep) + sys.path[1:]  # without the current folder
for folder in filter(os.path.isdir, reversed(searched)):  # the first folder has precedence
    found = [name[:-10].split("-") for name in os.listdir(folder) if name.endswith(".dist-info")]
    packages.update(parts for parts in found if len(parts) == 2)
for script in sys.argv[2:]:
    try:
        with open(script, "rb") as file:
            tree = ast.parse(file.read())
        compile(tree, script, "exec")
        if not any(map(runs, tree.body)):
            defined = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    except SyntaxError as found:
        error = "line {}: {}".format(found.lineno, found.msg)
    except (OSError, ValueError):  # the start reports it
        pass
print(json.dumps([sys.version.split()[0], packages, error, defined]))
"""


@dataclass(frozen=True)
class Python:
    """A Python.

    Attributes:
        command: its path, and the options of the script's first line. If that line changes
            variables, this is `env` with its arguments.
        origin: what has chosen it, such as `VIRTUAL_ENV`.
    """

    command: tuple[str, ...] = (sys.executable,)
    origin: str = "Trainbox"

    @property
    def is_ours(self) -> bool:
        return self.command[0] == sys.executable


def choose_python(wanted: str | None, first_line: str, env: Mapping[str, str]) -> Python:
    """Return `wanted`, else the Python of the active environment or of a first line, else ours.

    Raises:
        WrongUse: the chosen one does not exist.
    """
    if wanted is not None:
        return Python((_found(wanted, f"--python {wanted}", env),), "--python")
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        if folder := env.get(name):
            if os.path.realpath(folder) == os.path.realpath(sys.prefix):
                break
            python = str(Path(folder).absolute() / "bin/python")
            return Python((_found(python, f"{name} {folder}", env),), name)
    if first_line.startswith("#!") and "python" in first_line:
        try:
            path, *options = shlex.split(first_line[2:])
            if path.endswith("/env"):
                words = options[options[:1] == ["-S"] :]
                if words[0].startswith("-") or "=" in words[0]:  # env changes variables
                    options = ["-S", first_line[2:].split(maxsplit=1)[1].removeprefix("-S")]
                else:
                    path, *options = words
        except (ValueError, IndexError):  # an open quote, or no program
            raise WrongUse(
                f"the first line {first_line} names no program: name a Python with --python"
            ) from None
        return Python((_found(path, f"the first line {first_line}", env), *options), "first line")
    return Python()


def python_of_path(env: Mapping[str, str]) -> Python | None:
    """Return the Python that a program finds by its name."""
    path = user_environment(env).get("PATH")
    found = shutil.which("python", path=path) or shutil.which("python3", path=path)
    return Python((found,), "PATH") if found else None


def ask(
    python: Python, env: Mapping[str, str], script: str | None
) -> tuple[str | None, dict[str, str]]:
    """Return the version of the Python, and the version of each package that it finds.

    No module of the user runs: Python starts in the root folder and without PYTHONPATH. If it does
    not answer, nothing is known.

    Raises:
        WrongUse: the Python cannot compile the file `script`, or nothing in it would run.
    """
    folders = os.pathsep.join(str(Path(folder).absolute()) for folder in user_folders(env))
    scripts = [str(Path(script).absolute())] if script else []
    try:
        answer = subprocess.run(
            [*python.command, "-E", "-c", _ASK, folders, *scripts],
            env=user_environment(env),
            cwd="/",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_S,
            check=True,
        )
        # A module that Python imports at its start may print as well.
        version, packages, error, defined = json.loads(answer.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return None, {}
    if error is not None:
        raise WrongUse(f"{script}, {error} (Python {version}): correct it, or use another --python")
    if defined:
        train = command("train", f"{script}:{defined[-1]}")
        raise WrongUse(
            f"{script} only defines classes, such as {defined[-1]}, so nothing would run: start a "
            f"task with `{train}`, or call it at the end of the script"
        )
    return version, dict(sorted(packages.items()))


def _found(name: str, what: str, env: Mapping[str, str]) -> str:
    """Return the path of the Python `name`. A link is kept: it is the environment's.

    Raises:
        WrongUse: it does not exist, or is not executable.
    """
    found = shutil.which(name, path=user_environment(env).get("PATH"))
    if found is None:
        raise WrongUse(f"{what}: {name} is not an executable file: name a Python with --python")
    return str(Path(found).absolute())
