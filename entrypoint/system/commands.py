"""How Trainbox starts its own modules: the command, its environment, and a check of sys.path."""

import os
import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from trainbox.contract.errors import WrongUse

# Variables of Python that a user's script gets. For our own modules, they could replace them.
OF_PYTHON = ("PYTHONPATH", "PYTHONSAFEPATH")
_PACKAGES = ("entrypoint", "trainbox", "trainer")
_HOME = Path(__file__).resolve().parents[2]
# Variables that torchrun sets for each of its processes. If a shell still has the values of another
# launch, a single process would wait for peers that do not exist.
_RANK_NAMES = frozenset(
    [
        "RANK",
        "LOCAL_RANK",
        "GROUP_RANK",
        "ROLE_RANK",
        "WORLD_SIZE",
        "LOCAL_WORLD_SIZE",
        "GROUP_WORLD_SIZE",
        "ROLE_WORLD_SIZE",
        "ROLE_NAME",
        "MASTER_ADDR",
        "MASTER_PORT",
        "TRAINBOX_STORE",
        "TRAINBOX_MESSAGES",
    ]
)


def command_of(module: str, *arguments: str, python: str = sys.executable) -> list[str]:
    """Return the command that runs one of Trainbox's own modules.

    `-P` keeps the current folder out of sys.path. Without it a user's trainer.py or statistics.py
    would run instead of ours.
    """
    return [python, "-P", "-m", module, *arguments]


def own_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of our own modules, in which no folder of a user comes first."""
    return {name: value for name, value in environment.items() if name not in OF_PYTHON}


def python_path(environment: Mapping[str, str]) -> list[str]:
    """Return the folders of PYTHONPATH."""
    return [folder for folder in environment.get("PYTHONPATH", "").split(os.pathsep) if folder]


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that a launcher sets for each process of a job."""
    return {
        name: value
        for name, value in environment.items()
        if name not in _RANK_NAMES
        and not name.startswith("TORCHELASTIC_")
        and not is_folder_of_script(name, value)
    }


def is_folder_of_script(name: str, value: str) -> bool:
    """Return whether the variable is the run folder of a script, which started this process.

    As the setting --run of a training, TRAINBOX_RUN is a name, and never a path.
    """
    return name == "TRAINBOX_RUN" and Path(value).is_absolute()


def check_packages(search_path: Sequence[str]) -> None:
    """Check that no other module on `search_path` has the name of one of Trainbox's packages.

    `search_path` has the form of sys.path.

    Raises:
        WrongUse: PYTHONPATH or an installed package would replace Trainbox's own code.
    """
    for name in _PACKAGES:
        spec = PathFinder.find_spec(name, search_path)
        if (
            spec is not None
            and spec.origin is not None
            and Path(spec.origin).resolve().parent != _HOME / name
        ):
            raise WrongUse(
                f"{spec.origin} has the name of Trainbox's own package {name} and comes before it "
                "in sys.path: rename it, or remove its folder from PYTHONPATH"
            )
