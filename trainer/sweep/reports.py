"""What a script reports in the metrics.jsonl of its run: JSON objects with a step and numbers."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path

# Entries that `trainbox run` itself writes, and keys that are not metrics.
_NOT_OF_THE_SCRIPT = ("health", "gpus")
_NOT_METRICS = ("step", "time_unix_s")
_LARGEST = 2**63


class Reports:
    """The reports of a script, read as the file grows.

    A report replaces an earlier one of the same step, since a script that starts again can repeat
    steps.
    """

    def __init__(self, path: Path, metric: tuple[str, str] | None) -> None:
        """Read `path`. `metric` is (`min` or `max`, name), or None."""
        self._path, self._metric, self._offset = path, metric, 0
        self._newest: dict[str, float] = {}
        self._compared: dict[int, dict[str, float]] = {}  # by step, those with the metric

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """Read new lines, and return the reports in them that have the metric, with their steps."""
        found = []
        for line in self._new_lines():
            report = parse(line)
            if report is None:
                continue
            step, values = report
            self._newest |= values
            if self._metric and self._metric[1] in values:
                self._compared.pop(step, None)  # so that the last one is the newest
                self._compared[step] = values
                found.append(report)
        return found

    def names(self) -> list[str]:
        """Return the names of all metrics that were reported."""
        return list(self._newest)

    def result(self) -> dict[str, float] | None:
        """Return the metrics of the trial, or None if the metric was not reported.

        These are the newest values, and all values of the report with the best value of the metric.
        If the newest value of the metric is not finite, it is the result.
        """
        if self._metric is None:
            return self._newest
        direction, name = self._metric
        values = list(self._compared.values())
        if not values:
            return None
        finite = [report for report in values if math.isfinite(report[name])]
        if not math.isfinite(values[-1][name]):
            return self._newest | values[-1]
        return self._newest | (min if direction == "min" else max)(finite, key=lambda r: r[name])

    def _new_lines(self) -> list[bytes]:
        try:
            with self._path.open("rb") as file:
                if file.seek(0, os.SEEK_END) < self._offset:
                    self._offset = 0  # the script has replaced the file
                file.seek(self._offset)
                lines, end, _ = file.read().rpartition(b"\n")
        except OSError:
            return []
        self._offset += len(lines) + len(end)
        return lines.split(b"\n")


def parse(line: bytes) -> tuple[int, dict[str, float]] | None:
    """Return the step and the numbers of a line if it is a report of the script."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict) or entry.get("kind") in _NOT_OF_THE_SCRIPT:
        return None
    step = entry.get("step")
    if type(step) is not int or abs(step) > _LARGEST:
        return None
    return step, _numbers(entry)


def _numbers(entry: Mapping[str, object]) -> dict[str, float]:
    return {
        name: value
        for name, value in entry.items()
        if name not in _NOT_METRICS
        and (type(value) is float or (type(value) is int and abs(value) < _LARGEST))
    }
