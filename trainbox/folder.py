"""The folder of a run."""

import functools
import os
import sys
from pathlib import Path

from trainbox.folders.write_failures import writing
from trainbox.options.run_name import run_name


def run_folder() -> Path:
    """Return the absolute path of this run's folder, and make the folder.

    Under `trainbox run` it is the folder of TRAINBOX_RUN. Otherwise it is the folder that `trainbox
    run` would choose for this script: the name of the script and a digest of the command, in
    TRAINBOX_RUNS_DIR or `runs`. So the same command finds the same folder, and all ranks have the
    same one.

    Raises:
        StorageFailure: The folder cannot be made.
    """
    path = Path(os.environ.get("TRAINBOX_RUN") or _default()).absolute()
    with writing(path, "set another folder in TRAINBOX_RUN"):
        path.mkdir(parents=True, exist_ok=True)
    return path


@functools.cache  # a script may change its folder or its arguments later
def _default() -> Path:
    script, *arguments = sys.argv or [""]
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    # A folder or a zip file that Python runs has a module as well, with this name.
    module = spec.name if spec is not None and spec.name != "__main__" else None
    if module is not None:
        script = module.removesuffix(".__main__")
    elif script in ("", "-c", "-"):
        script = "script"
    runs = os.environ.get("TRAINBOX_RUNS_DIR") or "runs"
    return Path.cwd() / runs / run_name(script, module is not None, arguments)
