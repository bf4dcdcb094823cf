"""Pictures with their labels, and the choice of the pictures for training, validation and test."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trainer.tasks.reading.files import number_of

TRAIN, VALIDATION, TEST = "training", "validation", "test"


@dataclass(frozen=True)
class Picture:
    """A picture file and its labels.

    Attributes:
        name: The path relative to the folder of the data.
        labels: One class, one number as text, or any number of labels. A picture to predict has
            none.
        part: TRAIN, VALIDATION or TEST, or None if the name decides.
        row: The row of the CSV that lists the picture, as in `labels.csv, row 7`, or "".
    """

    path: Path
    name: str
    labels: tuple[str, ...] = ()
    part: str | None = None
    row: str = ""


def name_in(folder: Path, path: Path) -> str:
    """Return `path` relative to `folder`, or the whole path of a file that is elsewhere."""
    path, folder = Path.cwd() / path, Path.cwd() / folder
    return (path.relative_to(folder) if path.is_relative_to(folder) else path).as_posix()


def split(
    pictures: Sequence[Picture], validation_share: float, test_share: float, seed: int
) -> dict[str, list[Picture]]:
    """Return the pictures of each part, in their order.

    The number of a name, from 0 to 1, decides about a picture without a part: below
    `validation_share` it is for validation, and in the last `test_share` for the test. If there are
    parts, but no picture is for validation, the numbers decide about the pictures for training.
    """
    parts: dict[str, list[Picture]] = {TRAIN: [], VALIDATION: [], TEST: []}
    held_out = any(picture.part == VALIDATION for picture in pictures)
    for picture in pictures:
        part = picture.part
        if part is None or (part == TRAIN and not held_out):
            number = number_of(picture.name, seed)
            is_test = part is None and number >= 1 - test_share
            part = VALIDATION if number < validation_share else TEST if is_test else TRAIN
        parts[part].append(picture)
    return parts
