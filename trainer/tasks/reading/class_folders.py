"""Find the files of each class in a folder that has a folder for each class."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trainbox import WrongUse
from trainbox.found_files import files_in


def check_classes(names: Sequence[str]) -> None:
    """Raise WrongUse if `names`, from --set classes, are not the names of two folders or more."""
    is_name = all(name and not name.startswith(".") for name in names)
    if not is_name or len(set(names)) < max(2, len(names)):
        raise WrongUse(
            f"--set classes={'/'.join(names)}: use the different names of two folders or more, as "
            "in daisy/rose"
        )


def subfolders(folder: Path) -> list[str]:
    """Return the names of the folders in `folder`, sorted."""
    return sorted(path.name for path in folder.glob("[!.]*") if path.is_dir())


def find_classes(folder: Path, contents: str, example: str) -> list[str]:
    """Return the names of the class folders in `folder`, sorted.

    They have `contents`, such as pictures. The path of one ends as `example`, such as NAME.jpg.

    Raises:
        WrongUse: The folder has fewer than two classes.
    """
    names = subfolders(folder)
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
