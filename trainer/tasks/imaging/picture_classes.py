"""Define `PictureClasses`: what the tasks with classes share, one or several for each picture."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from trainbox import Classification, WrongUse
from trainer.tasks.imaging.class_folders import refuse_missing_classes
from trainer.tasks.imaging.models import WEIGHTS_FILES
from trainer.tasks.imaging.parts import Picture
from trainer.tasks.imaging.picture_task import PictureTask

_SHOWN_CLASSES = 10


@dataclass(frozen=True)
class PictureClasses(PictureTask, Classification):
    """Pictures whose labels are names of classes."""

    # The names of the classes, as in daisy/rose. An empty string means all classes, sorted.
    classes: str = ""

    @property
    def class_names(self) -> tuple[str, ...]:  # type: ignore[override]
        """The classes in the order of the model's outputs."""
        return tuple(self.classes.split("/")) if self.classes else ()

    @property
    def outputs(self) -> int:
        return len(self.class_names)

    def with_classes(self, names: tuple[str, ...]) -> Self:
        # The weights of the run replace the weights of a file, which may be missing now.
        weights = "" if self.weights.endswith(WEIGHTS_FILES) else self.weights
        return replace(self, classes="/".join(names), weights=weights)

    def with_data(self, data_dir: Path) -> Self:
        task = super().with_data(data_dir)
        if self.classes:
            return task
        return replace(task, classes="/".join(self.find_classes(data_dir / self.folder)))

    def find_classes(self, folder: Path) -> Sequence[str]:
        """Return the classes of the CSV file, sorted.

        Raises:
            WrongUse: it has fewer than two classes, or a name contains a slash.
        """
        found: dict[str, Picture] = {}
        for picture in super().listed(folder, test=False):
            found |= {label: picture for label in picture.labels if label not in found}
        if slash := next((label for label in found if "/" in label), None):
            raise WrongUse(
                f"{found[slash].row}: the label {slash} contains a slash, which separates the "
                "classes in --set classes=A/B: rename the label"
            )
        if len(found) < 2:
            raise WrongUse(
                f"{folder / self.labels} has {len(found)} label(s): add pictures of another one, "
                "or name the column of the labels with --set label_column=NAME"
            )
        return sorted(found)

    def check_part(
        self, folder: Path, part: Sequence[Picture], purpose: str, skipped: set[Path]
    ) -> None:
        refuse_missing_classes(folder, self.class_names, part, purpose, skipped)

    def described(self, train: Sequence[Picture], validation: Sequence[Picture]) -> dict[str, str]:
        rows = {"classes": self._counts(train), "validation": self._counts(validation)}
        by_word = {name.casefold().strip(): name for name in reversed(self.class_names)}
        alike = [
            f"{first} and {name}"
            for name in self.class_names
            if (first := by_word[name.casefold().strip()]) != name
        ]
        return rows | ({"labels": f"{', '.join(alike)} are different classes"} if alike else {})

    def _counts(self, pictures: Sequence[Picture]) -> str:
        """Return `daisy 120, rose 98`, or a summary of many classes."""
        counts = Counter(label for picture in pictures for label in picture.labels)
        names = self.class_names
        shown = [f"{name} {counts[name]:,}" for name in names[:_SHOWN_CLASSES]]
        if len(names) > _SHOWN_CLASSES:
            most, least = max(counts.values()), min(counts.values())
            shown.append(f"... ({len(names)} classes with {least:,} to {most:,} pictures)")
        return ", ".join(shown)
