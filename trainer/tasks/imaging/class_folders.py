"""List the pictures of class folders, and check that each part has all classes."""

import filecmp
import math
import os
from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path

from trainbox import WrongUse
from trainbox.found_files import is_left_out
from trainer.tasks.imaging.parts import TEST, TRAIN, VALIDATION, Picture, name_in
from trainer.tasks.reading.files import (
    class_files,
    refuse_missing,
    split_folders,
    subfolders,
    test_folder,
)

_DECODED = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".avif", ".bmp", ".gif"),
    *(".tif", ".tiff", ".ppm", ".pgm"),
)
# Pictures of HEIC cannot be decoded. They are found, so that a training does not leave them out
# silently.
ENDINGS = (*_DECODED, ".heic", ".heif")

# More than these are not compared with each other, so a header takes less than a second.
_MOST_PICTURES, _MOST_COMPARED = 50_000, 2_000
_TAIL_BYTES = 4096


def find_layout(folder: Path) -> tuple[Path, Path | None]:
    """Return where the class folders for training and for validation are in `folder`.

    The second one is None if the names of the files decide which ones are for validation.

    Raises:
        WrongUse: the folder does not exist, only the part for validation does, or a part has
            several names.
    """
    refuse_missing(folder, "pictures", "CLASS/NAME.jpg")
    return split_folders(folder, subfolders) or (folder, None)


def pictures_of_folders(
    folder: Path, classes: Sequence[str], test: bool, test_share: float
) -> list[Picture]:
    """Return the pictures of the folders train and val, or of the folder test if `test`.

    If `folder` has no such folders, return the pictures of all its class folders, without a part.
    The pictures are sorted by part, by class and then by name.

    Raises:
        WrongUse: a part has other classes, a class has no folder or no picture, or the pictures of
            the test are neither in a folder test nor chosen by `test_share`.
    """
    train, validation = find_layout(folder)
    if test and (validation is not None or not test_share):
        part = test_folder(folder)
        refuse_other_classes(part, classes, train, "the test")
        return find_pictures(part, classes, folder, TEST)
    if validation is None:
        return find_pictures(train, classes, folder)
    refuse_other_classes(validation, classes, train, "validation")
    return [
        *find_pictures(train, classes, folder, TRAIN),
        *find_pictures(validation, classes, folder, VALIDATION),
    ]


def find_pictures(
    place: Path, classes: Sequence[str], folder: Path, part: str | None = None
) -> list[Picture]:
    """Return the pictures of all classes in `place`, a folder in `folder` or `folder` itself.

    Raises:
        WrongUse: a class has no folder, or no picture.
    """
    found = class_files(place, classes, ENDINGS, "picture", _DECODED)
    return [Picture(path, name_in(folder, path), (classes[k],), part) for path, k in found]


def refuse_other_classes(folder: Path, classes: Sequence[str], train: Path, purpose: str) -> None:
    """Raise WrongUse if `folder`, the part for `purpose`, has other classes than `train`."""
    if others := [name for name in subfolders(folder) if name not in subfolders(train)]:
        raise WrongUse(
            f"{folder / others[0]} is a class that {train} does not have: rename the folder, or "
            "remove it"
        )
    if missing := [name for name in classes if not (folder / name).is_dir()]:
        raise WrongUse(
            f"{folder} has no folder {missing[0]}: add it with pictures of this class for {purpose}"
        )


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float(text))
    except ValueError:
        return False


def refuse_missing_classes(
    folder: Path,
    classes: Sequence[str],
    part: Sequence[Picture],
    purpose: str,
    skipped: Collection[Path],
) -> None:
    """Raise WrongUse if a class has no picture in `part`, the pictures of `folder` for `purpose`.

    `skipped` are damaged pictures, which are not in `part`.
    """
    present = {label for picture in part for label in picture.labels}
    if missing := [name for name in classes if name not in present]:
        besides = f" (damaged pictures are skipped, such as {min(skipped)})" if skipped else ""
        if all(map(_is_number, classes)) and not all(name.isdigit() for name in classes):
            raise WrongUse(
                f"{folder}: the labels are numbers, such as {missing[0]}, which no picture for "
                f"{purpose} has: train the task images_regression, whose targets are numbers"
            )
        raise WrongUse(
            f"{folder}: class {missing[0]} has no picture for {purpose}{besides}: add pictures, or "
            "choose the pictures of each part by the folders train, val and test"
        )


def equal_pictures(train: Sequence[Picture], validation: Sequence[Picture]) -> str:
    """Return a line about validation pictures whose files are equal to a training picture.

    Without such a picture, the line is empty. Only files of equal size are compared.
    """
    if len(train) + len(validation) > _MOST_PICTURES:
        return ""
    by_size = defaultdict[int, list[Path]](list)
    for picture in train:
        by_size[picture.path.stat().st_size].append(picture.path)
    pairs, compared = list[tuple[Path, Path]](), 0
    for picture in validation:
        alike = by_size[picture.path.stat().st_size]
        compared += len(alike)
        if compared > _MOST_COMPARED:
            break
        tail = alike and _tail(picture.path)
        for path in alike:
            if _tail(path) == tail and filecmp.cmp(path, picture.path, shallow=False):
                pairs.append((picture.path, path))
                break
    if not pairs:
        return ""
    return (
        f"{len(pairs)} validation picture(s) are equal to a training picture, such as "
        f"{pairs[0][0]} and {pairs[0][1]}: remove one of each two"
    )


def left_out(folder: Path, pictures: Sequence[Picture]) -> str:
    """Return a line about the files that were left out beside the pictures, or nothing."""
    folders = {picture.path.parent for picture in pictures}
    folders |= {path for each in folders for path in each.parents if path.is_relative_to(folder)}
    found = [path for each in sorted(folders) for path in each.iterdir() if is_left_out(path.name)]
    files = [
        file
        for path in found
        for file in (path.rglob("*") if path.is_dir() else [path])
        if file.name.lower().endswith(ENDINGS)
    ]
    return f"{len(files)} hidden pictures or thumbnails, such as {files[0]}" if files else ""


def _tail(path: Path) -> bytes:
    """Return the last bytes of a file, in which two pictures of equal size differ."""
    with path.open("rb") as file:
        file.seek(-min(_TAIL_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
        return file.read()
