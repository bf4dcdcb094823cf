"""The commit of a script's project, from git or from the files of its repository."""

import os
import re
import subprocess
from pathlib import Path

from trainbox.contract.files import read_text
from trainbox.contract.python_path import user_environment

_GIT_S = 5.0


def revision(folder: Path) -> str | None:
    """Return the commit of the project in `folder`; None outside of git.

    `-dirty` follows if files were changed. The image does not have git, and git refuses the folder
    of another user. Then `-unchecked` follows, because changes are not known.
    """
    return _described(folder) or _head(folder)


def _described(folder: Path) -> str | None:
    command = ["git", "-C", str(folder), "describe", "--always", "--abbrev=40", "--dirty"]
    try:
        found = subprocess.run(
            [*command, "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=_GIT_S,
            check=False,
            env={**user_environment(os.environ), "LC_ALL": "C"},  # git may run a user's filter
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found.stdout.strip() or None if found.returncode == 0 else None


def _head(folder: Path) -> str | None:
    roots = (parent / ".git" for parent in (folder, *folder.parents))
    repository = next((root for root in roots if root.is_dir()), None)
    if repository is None:
        return None
    try:
        head = read_text(repository / "HEAD").strip()
        if head.startswith("ref: "):
            head = _commit_of(repository, head.removeprefix("ref: "))
    except (OSError, ValueError):
        return None
    return f"{head}-unchecked" if re.fullmatch("[0-9a-f]{40,64}", head) else None


def _commit_of(repository: Path, reference: str) -> str:
    """Return the commit of a branch.

    Raises:
        OSError: the branch has no commit.
    """
    if (repository / reference).exists():
        return read_text(repository / reference).strip()
    lines = (line.split() for line in read_text(repository / "packed-refs").splitlines())
    return next((line[0] for line in lines if line[1:] == [reference]), "")
