"""The variables of another launch, which the commands of this one do not get."""

import re
from collections.abc import Mapping
from pathlib import Path

from trainbox.processes.environment import Internal

# Variables that torchrun sets for each of its processes. If a shell still has the values of another
# launch, a single process would wait for peers that do not exist.
_OF_RANKS = re.compile(
    r"(?:LOCAL_|GROUP_|ROLE_)?(?:RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(?:ADDR|PORT)|TORCHELASTIC_.*"
    rf"|{Internal.STORE}|{Internal.MESSAGES}",
    re.DOTALL,
)


def without_ranks(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without the variables that a launcher sets for each process of a job."""
    return {
        name: value
        for name, value in environment.items()
        if not _OF_RANKS.fullmatch(name) and not is_folder_of_script(name, value)
    }


def is_folder_of_script(name: str, value: str) -> bool:
    """Return whether the variable is the run folder of a script, which started this process.

    As the setting --run of a training, TRAINBOX_RUN is a name, and never a path.
    """
    return name == "TRAINBOX_RUN" and Path(value).is_absolute()
