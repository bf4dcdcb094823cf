"""The commit of a project, from git or the files of its repository."""

import re
from pathlib import Path

from trainbox.files.build_info import git
from trainbox.files.regular_files import read_bytes


def revision(folder: Path) -> str | None:
    """Return the commit of the project in `folder`; None outside of git.

    `-dirty` follows if files were changed. The image does not have git, and git refuses the folder
    of another user. Then `-unchecked` follows, because changes are not known.
    """
    described = git(folder, "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*")
    if described is None:
        return _head(folder)
    return described or None


def repository(folder: Path) -> Path | None:
    """Return the folder of the repository that has `folder`, or None."""
    roots = (folder, *folder.parents)
    return next((root for root in roots if (root / ".git").exists()), None)


def _head(folder: Path) -> str | None:
    """Return the commit in the newest line of git's log of HEAD."""
    try:
        log = read_bytes((repository(folder) or folder) / ".git/logs/HEAD")
    except (OSError, ValueError):
        return None
    found = re.match(rb"[0-9a-f]+ ([0-9a-f]{40,64}) ", log[log.rstrip().rfind(b"\n") + 1 :])
    return f"{found[1].decode()}-unchecked" if found else None
