"""The folder of a run."""

import functools
import hashlib
import os
import sys
from pathlib import Path

from trainbox.errors import StorageFailure


def run_folder() -> Path:
    """Return the absolute path of this run's folder, and make the folder.

    Under `trainbox run` it is the folder of TRAINBOX_RUN. Otherwise it is `runs/NAME` in the folder
    in which the script was started. NAME is the name of the script, followed by a digest of its
    arguments if it has any. So the same command finds the same folder, and all ranks have the same
    one.

    Raises:
        StorageFailure: The folder cannot be made.
    """
    path = Path(os.environ.get("TRAINBOX_RUN") or _default()).absolute()
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageFailure(
            f"cannot make the run folder {path}: {error.strerror or error}: set another folder in "
            "TRAINBOX_RUN"
        ) from error
    return path


@functools.cache  # a script may change its folder or its arguments later
def _default() -> Path:
    script, *arguments = sys.argv or [""]
    path = Path(script)
    name = path.parent.name if path.stem == "__main__" else path.stem
    if name in ("", "-c", "-"):
        name = "script"
    if arguments:
        digest = hashlib.sha256("\0".join(arguments).encode(errors="surrogateescape"))
        name += f"-{digest.hexdigest()[:8]}"
    return Path.cwd() / "runs" / name
