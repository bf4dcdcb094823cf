"""Read the scalars that another program writes for TensorBoard, without torch."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any


class ScalarReader:
    """Reads the scalars of a growing file, each of them once."""

    def __init__(self, path: Path) -> None:
        self._path = str(path)
        self._loader: Any = None
        self._tags = set[str]()

    def read(self) -> Iterator[tuple[str, int, float]]:
        """Yield (tag, step, value) of each new scalar; none if the file cannot be read."""
        # A process that never reads a file does without the 0.3 s of these imports.
        from tensorboard.backend.event_processing.event_file_loader import EventFileLoader
        from tensorboard.compat import tf
        from tensorboard.util.tensor_util import make_ndarray

        with contextlib.suppress(OSError, tf.errors.OpError):
            self._loader = self._loader or EventFileLoader(self._path)
            for event in self._loader.Load():
                for value in event.summary.value:
                    # Only the first value of a tag has its kind.
                    if value.metadata.plugin_data.plugin_name == "scalars":
                        self._tags.add(value.tag)
                    if value.tag in self._tags:
                        yield value.tag, event.step, float(make_ndarray(value.tensor).item())


def event_files(folder: Path) -> Iterator[Path]:
    """Yield the files for TensorBoard below `folder`. Links to folders are not followed."""
    for path, _, names in os.walk(folder):
        yield from (Path(path, name) for name in names if ".tfevents." in name)
