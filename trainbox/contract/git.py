"""Ask git about the repository of a project."""

import os
import subprocess
from pathlib import Path

from trainbox.contract.python_path import user_environment

_GIT_S = 10.0


def git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git in `folder`; None if git is missing or refuses."""
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_GIT_S,
            check=False,
            env={**user_environment(os.environ), "LC_ALL": "C"},  # git may run a user's filter
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() if found.returncode == 0 else None
