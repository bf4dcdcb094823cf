"""Find the files of a folder and of its classes, and split them into training and validation."""

import difflib
import hashlib
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainbox import WrongUse
from trainbox.found_files import files_in, is_left_out

# Names of parts of a data set, and pairs of folders for pictures and what belongs to them.
_PART = re.compile(r"(?i)(^|[_ -])(train(ing)?|test(ing)?|val(id|idation)?|eval)([_ -]|$)")
_PAIRS = [{"images", other} for other in ("annotations", "labels", "masks")]
_TRAIN, _VALIDATION, _TEST = ("train",), ("val", "validation", "valid"), ("test",)


def refuse_missing(folder: Path, contents: str, example: str) -> None:
    """Raise WrongUse if `folder` is not a folder: `contents` belong there, such as `example`."""
    if folder.is_dir():
        return
    if folder.exists():
        raise WrongUse(
            f"{folder} is a file: put {contents} into a folder, and name the folder with --set "
            "folder=NAME"
        )
    # The user may have named the folder from here, as in --set folder=data/flowers.
    ends = (Path(*folder.parts[start:]) for start in range(1, len(folder.parts)))
    here = next((end for end in ends if end.is_dir()), None)
    beside = subfolders(folder.parent) if folder.parent.is_dir() else []
    if here is not None:
        fix = f"there is a folder {here} in {Path.cwd()}: add --data-dir ."
    elif near := nearest(folder.name, beside):
        fix = f"did you mean {folder.parent / near} (--set folder={near})?"
    else:
        others = f" ({folder.parent} has {', '.join(beside[:3])})" if beside else ""
        fix = (
            f"put {contents} there, as {folder}/{example}, or set another folder with --data-dir "
            f"or --set folder=NAME{others}"
        )
    raise WrongUse(f"{folder} does not exist: {fix}")


def nearest(name: str, known: Sequence[str]) -> str:
    """Return the known name that is nearest to `name`, in lower or upper case, or ""."""
    by_lower_case = {each.lower(): each for each in known}
    near = difflib.get_close_matches(name.lower(), by_lower_case, n=1)
    return by_lower_case[near[0]] if near else ""


def split_folders(
    folder: Path, is_part: Callable[[Path], object] = lambda _: True
) -> tuple[Path, Path | None] | None:
    """Return the folders for training and for validation in `folder`, or None if it has neither.

    Their names are in lower or upper case. One of them alone does not count unless it `is_part`.
    Without a folder for validation, the second one is None.

    Raises:
        WrongUse: only the folder for validation exists, or one of them under several names.
    """
    train, validation = _named(folder, _TRAIN), _named(folder, _VALIDATION)
    for found, purpose in ((train, "training"), (validation, "validation")):
        if train and validation and len(found) > 1:
            raise WrongUse(
                f"{folder} has several folders for {purpose} "
                f"({', '.join(path.name for path in found)}): keep one of them there"
            )
    if validation and not train and is_part(validation[0]):
        raise WrongUse(
            f"{folder} has a folder {validation[0].name} but no folder train: add train, or rename "
            f"{validation[0].name} to train"
        )
    if train and (validation or is_part(train[0])):
        return train[0], validation[0] if validation else None
    return None


def test_folder(folder: Path) -> Path:
    """Return the folder test beside train and val in `folder`.

    Raises:
        WrongUse: one of the three does not exist, or test exists under several names.
    """
    found = _named(folder, _TEST)
    if split_folders(folder) is None or len(found) != 1:
        raise WrongUse(
            f"{folder} has no test data: make the folders train, val and test in it, or use --data "
            "validation"
            if len(found) < 2
            else f"{folder} has several folders for the test ({', '.join(p.name for p in found)}): "
            "keep one of them there"
        )
    return found[0]


def _named(folder: Path, names: tuple[str, ...]) -> list[Path]:
    return sorted(p for p in folder.glob("[!.]*") if p.name.lower() in names and p.is_dir())


def number_of(name: str, seed: int = 0) -> float:
    """Return a number from 0 to below 1 that follows from the file `name` and `seed`.

    `name` is a path relative to the folder of the data. Only the name decides, so a file keeps its
    number when others are added or removed.
    """
    digest = hashlib.sha256(os.fsencode(f"{seed}/{name}" if seed else name)).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def is_held_out(name: str, share: float) -> bool:
    """Return whether the file `name` is for validation: about `share` of all names are."""
    return number_of(name) < share


def check_classes(names: Sequence[str]) -> None:
    """Raise WrongUse if `names`, from --set classes, are not the names of two folders or more."""
    is_name = all(name and not name.startswith(".") for name in names)
    if not is_name or len(set(names)) < max(2, len(names)):
        raise WrongUse(
            f"--set classes={'/'.join(names)}: use the different names of two folders or more, as "
            "in daisy/rose"
        )


def subfolders(folder: Path) -> list[str]:
    """Return the names of the folders in `folder`, sorted, without links to a folder around it."""
    around = {folder.resolve(), *folder.resolve().parents}
    return sorted(
        path.name
        for path in folder.iterdir()
        if not is_left_out(path.name)
        and path.is_dir()
        and not (path.is_symlink() and path.resolve() in around)
    )


def _classes_inside(folder: Path) -> list[str]:
    """Return the folders in `folder`, or in the only folder that it has, as after an extraction."""
    while len(names := subfolders(folder)) == 1:
        folder /= names[0]
    return names


def find_classes(folder: Path, contents: str, example: str) -> list[str]:
    """Return the names of the class folders in `folder`, sorted.

    They have `contents`, such as pictures. The path of one ends as `example`, such as NAME.jpg.

    Raises:
        WrongUse: The folder has fewer than two classes, or two of them have the same folders.
    """
    names = subfolders(folder)
    parts = [name for name in names if _PART.search(name) and subfolders(folder / name)]
    if len(parts) > 1 or {name.lower() for name in names} in _PAIRS:
        raise WrongUse(
            f"{folder}: {names[0]} and {names[-1]} may be parts of the data by their names, not "
            f"classes: name one part, as in --set folder={folder.name}/{names[0]}, or the classes, "
            f"as in --set classes={names[0]}/{names[-1]}"
        )
    inside = dict[tuple[str, ...], str]()
    for name in names:
        classes = tuple(_classes_inside(folder / name))
        if len(classes) > 1 and classes in inside:
            raise WrongUse(
                f"{folder}: {inside[classes]} and {name} have the same folders "
                f"({', '.join(classes[:3])}), so they may be parts of the data, not classes: name "
                f"one part, as in --set folder={folder.name}/{inside[classes]}, or the classes, as "
                f"in --set classes={inside[classes]}/{name}"
            )
        inside[classes] = name
    if len(names) < 2:
        raise WrongUse(
            f"{folder} has {len(names)} class folder(s): put the {contents} into a folder for each "
            f"of two classes or more, as {folder}/CLASS/{example}"
        )
    return names


def class_files(
    folder: Path, classes: Sequence[str], endings: tuple[str, ...], kind: str, shown: Sequence[str]
) -> list[tuple[Path, int]]:
    """Return the files of all classes in `folder` with their labels, by class and then by name.

    `kind` is a name for one of them, such as picture. `shown` are the endings for a message.

    Raises:
        WrongUse: A class has no folder, or no file with one of the `endings`.
    """
    found: list[tuple[Path, int]] = []
    for label, name in enumerate(classes):
        if not (folder / name).is_dir():
            raise WrongUse(
                f"{folder / name} does not exist: use folders of {folder} in --set classes="
                f"{'/'.join(classes)}"
            )
        own = [(path, label) for path in files_in(folder / name, endings)]
        if not own:
            raise WrongUse(
                f"{folder / name} has no {kind} ({', '.join(shown)}): add one, or remove the "
                "class from all folders"
            )
        found += own
    return found


def class_weights(labels: Sequence[int], classes: int) -> Tensor:
    """Return weights (classes,) that are inversely proportional to the numbers of examples.

    Their mean over the examples is 1.
    """
    return len(labels) / (classes * torch.bincount(torch.tensor(labels), minlength=classes))
