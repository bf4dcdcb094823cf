"""Find the pictures of each class in a folder, and split them into training and validation."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from trainbox import WrongUse

ENDINGS = (
    *(".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif"),
    *(".tif", ".tiff", ".ppm", ".pgm"),
)
_TRAIN, _VALIDATION = "train", ("val", "validation", "valid")


@dataclass(frozen=True)
class Picture:
    """A picture file and the index of its class."""

    path: Path
    label: int


@dataclass(frozen=True)
class Layout:
    """Where the class folders are: `validation` is None if the file names decide."""

    train: Path
    validation: Path | None


def find_layout(folder: Path) -> Layout:
    """Return the layout of `folder`: train/CLASS and val/CLASS, or CLASS alone.

    Raises:
        WrongUse: the folder does not exist, or only one of the two parts does.
    """
    if not folder.is_dir():
        here = Path(folder.name)
        fix = (
            f"there is a folder {folder.name} in {Path.cwd()}: add --data-dir ."
            if here.is_dir() and here.resolve() != folder.resolve()
            else f"put pictures there, as {folder}/CLASS/NAME.jpg, or set another folder with "
            "--data-dir or --set folder=NAME"
        )
        raise WrongUse(f"{folder} does not exist: {fix}")
    found = [name for name in _VALIDATION if (folder / name).is_dir()]
    if (folder / _TRAIN).is_dir() and found:
        return Layout(folder / _TRAIN, folder / found[0])
    if (folder / _TRAIN).is_dir() and _subfolders(folder / _TRAIN):
        raise WrongUse(
            f"{folder} has a folder train but no folder val: add val, or split train with --set "
            f"folder={folder / _TRAIN}"
        )
    return Layout(folder, None)


def find_classes(folder: Path) -> list[str]:
    """Return the names of the class folders in `folder`, sorted.

    Raises:
        WrongUse: the folder has fewer than two classes.
    """
    names = _subfolders(folder)
    if len(names) < 2:
        raise WrongUse(
            f"{folder} has {len(names)} class folder(s): put the pictures into a folder for each "
            f"of two classes or more, as {folder}/CLASS/NAME.jpg"
        )
    return names


def find_pictures(folder: Path, classes: Sequence[str]) -> list[Picture]:
    """Return the pictures of all classes in `folder`, by class and then by name.

    Raises:
        WrongUse: a class has no folder, or no picture.
    """
    pictures: list[Picture] = []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            raise WrongUse(
                f"{folder / name} does not exist: use folders of {folder} in --set classes="
                f"{'/'.join(classes)}"
            )
        found = [Picture(path, label) for path in _files(folder / name)]
        if not found:
            raise WrongUse(
                f"{folder / name} has no picture ({', '.join(ENDINGS)}): add one, or remove the "
                "folder"
            )
        pictures.extend(found)
    return pictures


def refuse_other_classes(folder: Path, classes: Sequence[str], train: Path) -> None:
    """Raise WrongUse if `folder`, the validation part, has classes that `train` does not have."""
    if others := [name for name in _subfolders(folder) if name not in _subfolders(train)]:
        raise WrongUse(
            f"{folder / others[0]} is a class that {train} does not have: rename the folder, or "
            "remove it"
        )
    if missing := [name for name in classes if not (folder / name).is_dir()]:
        raise WrongUse(
            f"{folder} has no folder {missing[0]}: add it with pictures of this class for "
            "validation"
        )


def is_held_out(name: str, share: float) -> bool:
    """Return whether the picture `name` is for validation: about `share` of all names are.

    `name` is a path relative to the folder of the data. Only the name decides, so a picture stays
    in its part when others are added or removed.
    """
    digest = hashlib.sha256(os.fsencode(name)).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def _subfolders(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("[!.]*") if path.is_dir())


def _files(folder: Path, outer: tuple[tuple[int, int], ...] = ()) -> Iterator[Path]:
    """Yield the picture files in `folder` and its folders, in the order of their names.

    Links are followed, but not into a folder that contains the link (`outer`). A link to a missing
    picture is yielded, so that it is reported as damaged.
    """
    status = folder.stat()
    outer = (*outer, (status.st_dev, status.st_ino))
    with os.scandir(folder) as listing:
        entries = sorted(listing, key=lambda entry: entry.name)
    for entry in entries:
        if entry.name.startswith("."):
            continue
        if entry.is_dir():
            inner = entry.stat()
            if (inner.st_dev, inner.st_ino) not in outer:
                yield from _files(Path(entry.path), outer)
        elif entry.name.lower().endswith(ENDINGS):
            yield Path(entry.path)
