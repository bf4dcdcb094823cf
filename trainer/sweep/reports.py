"""What a script reports: lines of JSON, scalars for TensorBoard, or numbers in its output."""

import contextlib
import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainbox.files.entries import EntryReader, is_of_script, step_of
from trainbox.files.regular_files import open_from

Report = tuple[int, dict[str, float]]  # a step, and the numbers of this step

_NOT_METRICS = ("step", "time_unix_s")
_LARGEST = 2**63


class Reports:
    """The reports of a trial from one source, read as they arrive.

    A report replaces an earlier one of the same step, since a script that starts again can repeat
    steps.
    """

    def __init__(
        self,
        source: "JsonLines | Output | TensorBoard",
        metric: tuple[str, str] | None,
        last: bool = False,
    ) -> None:
        """Read `source`, which may return reports again. `metric` is (`min` or `max`, name).

        The result is the report with the best value of the metric, or the `last` one.
        """
        self._source, self._metric, self._last = source, metric, last
        self.newest: dict[str, float] = {}
        self._compared: dict[int, dict[str, float]] = {}  # by step, the reports with the metric

    def read(self) -> list[Report]:
        """Return the new reports that have the metric."""
        found = []
        for step, values in self._source.read():
            self.newest |= values
            if self._metric and self._metric[1] in values and self._compared.get(step) != values:
                self._compared.pop(step, None)  # so that the last one is the newest
                self._compared[step] = values
                found.append((step, values))
        return found

    @property
    def is_found(self) -> bool:
        """Whether the metric was reported, or anything without a metric."""
        return bool(self._compared if self._metric else self.newest)

    def result(self) -> dict[str, float]:
        """Return the newest values, and all values of the report that is the result.

        If the newest value of the metric is not finite, it is the result.
        """
        if not self._metric or not self._compared:
            return self.newest
        direction, name = self._metric
        values = list(self._compared.values())
        finite = [report for report in values if math.isfinite(report[name])]
        if self._last or not math.isfinite(values[-1][name]):
            return self.newest | values[-1]
        return self.newest | (min if direction == "min" else max)(finite, key=lambda r: r[name])


class JsonLines:
    """The JSON objects with a step that a script prints, or appends to metrics.jsonl."""

    def __init__(self, run: Path) -> None:
        self._reader = EntryReader(run / "metrics.jsonl")

    def read(self) -> Iterator[Report]:
        return (report for entry in self._reader.read() if (report := parse(entry)))


class Output:
    """The numbers that a regular expression finds in the output of a script."""

    def __init__(self, log: Path, begin: int, name: str, pattern: str) -> None:
        """Search the log from byte `begin` on for numbers of the metric `name`."""
        self._log, self._at, self._name, self._count = log, begin, name, 0
        self._pattern = re.compile(pattern)
        self._step = self._pattern.groupindex.get("step")

    def read(self) -> Iterator[Report]:
        lines: list[bytes] = []
        with contextlib.suppress(OSError), open_from(self._log, self._at) as file:
            self._at, lines = file.tell(), file.read().splitlines(keepends=True)
        count = self._count
        for line in lines:
            for match in self._pattern.finditer(line.decode(errors="replace")):
                with contextlib.suppress(TypeError, ValueError):  # not a number
                    value = float(match[2 if self._step == 1 else 1])
                    step = int(match[self._step]) if self._step else count + 1
                    yield step, {self._name: value}
                    count += 1
            if line.endswith((b"\n", b"\r")):  # the rest of another one is not written yet
                self._at, self._count = self._at + len(line), count


class TensorBoard:
    """The scalars for TensorBoard in the run folder."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._earlier = {path.parent for path in event_files(run)}
        self._readers: dict[Path, ScalarReader] = {}
        self._values = defaultdict[str, dict[Path, dict[int, float]]](dict)

    def read(self) -> list[Report]:
        for path in event_files(self._run):
            reader = self._readers.setdefault(path, ScalarReader(path))
            for tag, step, value in reader.read():
                self._values[tag].setdefault(path.parent, {})[step] = value
        reports = defaultdict[int, dict[str, float]](dict)
        for tag, found in self._values.items():
            # Lightning writes to another folder when the script starts again.
            folders = {f: v for f, v in found.items() if f not in self._earlier} or found
            for folder, values in folders.items():
                # Keras writes the same tags to the folders `train` and `validation`.
                name = tag if len(folders) == 1 else f"{folder.name}/{tag}"
                for step, value in values.items():
                    reports[step][name] = value
        return sorted(reports.items())


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


def parse(entry: Mapping[str, Any]) -> Report | None:
    """Return the step and the numbers of an entry if it is a report of the script.

    `trainbox.metrics` writes NaN and infinities as null, which is read as NaN.
    """
    if not is_of_script(entry) or (step := step_of(entry)) is None:
        return None
    return step, {
        name: math.nan if value is None else value
        for name, value in entry.items()
        if name not in _NOT_METRICS and (value is None or type(value) is float or _is_whole(value))
    }


def _is_whole(value: Any) -> bool:
    return type(value) is int and abs(value) < _LARGEST
