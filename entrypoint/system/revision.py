"""The commit of a project, from git or the files of its repository, and the image's build."""

import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainbox.contract.files import read_object, read_text
from trainbox.contract.python_path import user_environment

_GIT_S = 5.0


def revision(folder: Path, is_dirty: bool = False) -> str | None:
    """Return the commit of the project in `folder`; None outside of git.

    `-dirty` follows if files were changed, or if `is_dirty`. The image does not have git, and git
    refuses the folder of another user. Then `-unchecked` follows, because changes are not known.
    """
    described = _git(folder, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    if described is None:
        return _head(folder)
    return f"{described.removesuffix('-dirty')}-dirty" if is_dirty else described or None


def repository(folder: Path) -> Path | None:
    """Return the folder of the repository that has `folder`, or None."""
    roots = (folder, *folder.parents)
    return next((root for root in roots if (root / ".git").exists()), None)


def committed(folder: Path) -> frozenset[str]:
    """Return git's digests of the files in the commit; empty if they are not known."""
    listed = _git(folder, "ls-tree", "-r", "--full-tree", "HEAD") or ""
    return frozenset(line.split()[2] for line in listed.splitlines())


def image_build(env: Mapping[str, str]) -> dict[str, Any]:
    """Return the build information of the image; empty outside of an image."""
    try:
        return read_object(Path(env.get("TRAINBOX_BUILD_INFO", "")))
    except (OSError, ValueError):
        return {}


def _git(folder: Path, *arguments: str) -> str | None:
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


def _head(folder: Path) -> str | None:
    root = repository(folder)
    if root is None:
        return None
    try:
        head = read_text(root / ".git/HEAD").strip()
        if head.startswith("ref: "):
            head = _commit_of(root / ".git", head.removeprefix("ref: "))
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
