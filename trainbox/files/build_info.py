"""How the running code was built, as manifests record it, and what git knows of a project."""

import hashlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainbox.files.regular_files import object_if_valid
from trainbox.processes.environment import user_environment

_GIT_S = 10.0


def build_info(env: Mapping[str, str]) -> dict[str, Any]:
    """Return what the image has recorded at its build, and the digest of the added packages' lock.

    `make build REQUIREMENTS=my.txt` copies my.lock into the environment.
    """
    lock = Path(sys.prefix) / "extra.lock"
    digest = hashlib.sha256(lock.read_bytes()).hexdigest() if lock.exists() else None
    built = object_if_valid(Path(env.get("TRAINBOX_BUILD_INFO", "")))  # None outside of the image
    return (built or {}) | {"extra_lock_sha256": digest}


def git(folder: Path, *arguments: str) -> str | None:
    """Return the output of git in `folder`; None if git is missing or refuses.

    Bytes that are not UTF-8 are surrogates, as in the names of files.
    """
    try:
        found = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            timeout=_GIT_S,
            check=False,
            env={**user_environment(os.environ), "LC_ALL": "C"},  # git may run a user's filter
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return os.fsdecode(found.stdout).strip("\n") if found.returncode == 0 else None
