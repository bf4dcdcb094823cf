"""The Python that runs a user's script, and what is installed there."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainbox.contract.errors import WrongUse
from trainbox.contract.python_path import user_environment, user_folders

_ASK_S = 30.0
_ASK = "import json, sys; print(json.dumps([sys.version.split()[0], sys.path[1:]]))"
_HEADERS = {key: re.compile(rf"^{key}: *(.+)$", re.MULTILINE) for key in ("Name", "Version")}


@dataclass(frozen=True)
class Python:
    """A Python.

    Attributes:
        command: its path, and the options of the script's first line.
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
        path, *words = shlex.split(first_line[2:])
        if path.endswith("/env"):
            path, *words = [word for word in words if word != "-S" and "=" not in word]
        return Python((_found(path, f"the first line {first_line}", env), *words), "first line")
    return Python()


def python_of_path(env: Mapping[str, str]) -> Python | None:
    """Return the Python that a program finds by its name."""
    path = user_environment(env).get("PATH")
    found = shutil.which("python", path=path) or shutil.which("python3", path=path)
    return Python((found,), "PATH") if found else None


def installed(python: Python, env: Mapping[str, str]) -> tuple[str | None, dict[str, str]]:
    """Return the version of the Python and of each package that it finds.

    Another Python than ours is asked. If it cannot answer, nothing is known.
    """
    if python.is_ours:
        return platform.python_version(), packages([*user_folders(env), *sys.path])
    try:
        answer = subprocess.run(
            [*python.command, "-c", _ASK],
            env=user_environment(env),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_ASK_S,
            check=True,
        )
        version, search_path = json.loads(answer.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None, {}
    return version, packages(search_path)


def packages(search_path: Sequence[str]) -> dict[str, str]:
    """Return the version of each package that is installed in a folder of `search_path`.

    importlib.metadata takes as long as the rest of a start: it parses the long descriptions of
    packages, and its own import loads the library for e-mail.
    """
    found: dict[str, str] = {}
    for folder in reversed(search_path):  # the first folder has precedence
        for path in Path(folder).glob("*.dist-info/METADATA"):
            headers = path.read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
            name, version = (_HEADERS[key].search(headers) for key in ("Name", "Version"))
            if name and version:
                found[name[1].strip()] = version[1].strip()
    return dict(sorted(found.items()))


def _found(name: str, what: str, env: Mapping[str, str]) -> str:
    """Return the path of the Python `name`. A link is kept: it is the environment's.

    Raises:
        WrongUse: it does not exist, or is not executable.
    """
    found = shutil.which(name, path=user_environment(env).get("PATH"))
    if found is None:
        raise WrongUse(f"{what}: {name} is not an executable file: name a Python with --python")
    return str(Path(found).absolute())
