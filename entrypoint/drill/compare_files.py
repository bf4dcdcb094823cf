"""Compare a file of two trainings in a process that can read tensors."""

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from entrypoint.drill.written_files import RUN
from entrypoint.script.working_copies import WORK
from trainbox.errors import WrongUse
from trainbox.processes.programs import OUTPUTS, command_of

# trainer/programs/outputs/formats.py has the same suffixes.
SUFFIXES = (".safetensors", ".pt", ".pth", ".bin", ".npz", ".npy", ".csv", ".json")


@dataclass(frozen=True)
class FileComparison:
    """The digest of a file, and how the file differs from the undisturbed training's file.

    `difference` is None if the files agree. `largest` is the largest difference of two numbers.
    """

    digest: str
    difference: str | None
    largest: float = 0.0


def check_file(file: str) -> None:
    """Check that `file` can be the file that a drill compares.

    Raises:
        WrongUse: it is elsewhere, or its format cannot be read.
    """
    path = Path(file)
    if path.is_absolute() or ".." in path.parts:
        raise WrongUse(
            f"--compare {file} is neither in the run folder nor in the current one: give a path in "
            f"it, such as {path.name}"
        )
    if path.suffix not in SUFFIXES:
        raise WrongUse(
            f"--compare {file} has a format that cannot be read: use one of {' '.join(SUFFIXES)}"
        )


def compare(
    reference: tuple[Path, Path], other: tuple[Path, Path], tolerance: float, ignored: Sequence[str]
) -> FileComparison:
    """Compare two files, each given with the folder of its training.

    A file that is missing or damaged, or that has nothing to compare, is a difference.
    """
    request = {
        "tolerance": tolerance,
        "ignored": list(ignored),
        "files": [[str(file), str(own / RUN), str(own / WORK)] for file, own in (reference, other)],
    }
    ended = subprocess.run(
        command_of(OUTPUTS, json.dumps(request)),
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        last = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        return FileComparison("-" * 16, last.removeprefix("trainbox: "))
    return FileComparison(**json.loads(ended.stdout))
