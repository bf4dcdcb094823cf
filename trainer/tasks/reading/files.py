"""Find the files of a folder, and split them into training and validation."""

import hashlib
import os
from pathlib import Path

from trainbox import WrongUse

TRAIN, VALIDATION = "train", ("val", "validation", "valid")


def refuse_missing(folder: Path, contents: str, example: str) -> None:
    """Raise WrongUse if `folder` is not a folder: `contents` belong there, such as `example`."""
    if folder.is_dir():
        return
    if folder.exists():
        raise WrongUse(
            f"{folder} is a file: put {contents} into a folder, and name the folder with --set "
            "folder=NAME"
        )
    here = Path(folder.name)
    fix = (
        f"there is a folder {folder.name} in {Path.cwd()}: add --data-dir ."
        if here.is_dir() and here.resolve() != folder.resolve()
        else f"put {contents} there, as {folder}/{example}, or set another folder with "
        "--data-dir or --set folder=NAME"
    )
    raise WrongUse(f"{folder} does not exist: {fix}")


def validation_folder(folder: Path) -> Path | None:
    """Return the folder for validation in `folder` if it has this folder and `train`."""
    found = [folder / name for name in VALIDATION if (folder / name).is_dir()]
    return found[0] if found and (folder / TRAIN).is_dir() else None


def is_held_out(name: str, share: float) -> bool:
    """Return whether the file `name` is for validation: about `share` of all names are.

    `name` is a path relative to the folder of the data. Only the name decides, so a file stays
    in its part when others are added or removed.
    """
    digest = hashlib.sha256(os.fsencode(name)).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64
