"""What a script reports in the metrics.jsonl of its run: JSON objects with a step and numbers."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainbox.contract.entries import EntryReader, is_of_script

_NOT_METRICS = ("step", "time_unix_s")
_LARGEST = 2**63


class Reports:
    """The reports of a script, read as the file grows.

    A report replaces an earlier one of the same step, since a script that starts again can repeat
    steps.
    """

    def __init__(self, path: Path, metric: tuple[str, str] | None) -> None:
        """Read `path`. `metric` is (`min` or `max`, name), or None."""
        self._reader, self._metric = EntryReader(path), metric
        self._newest: dict[str, float] = {}
        self._compared: dict[int, dict[str, float]] = {}  # by step, those with the metric

    def read(self) -> list[tuple[int, dict[str, float]]]:
        """Read new entries, and return the reports that have the metric, with their steps."""
        found = []
        for entry in self._reader.read():
            report = parse(entry)
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


def parse(entry: Mapping[str, Any]) -> tuple[int, dict[str, float]] | None:
    """Return the step and the numbers of an entry if it is a report of the script."""
    step = entry.get("step")
    if not is_of_script(entry) or type(step) is not int or abs(step) > _LARGEST:
        return None
    return step, _numbers(entry)


def _numbers(entry: Mapping[str, object]) -> dict[str, float]:
    return {
        name: value
        for name, value in entry.items()
        if name not in _NOT_METRICS
        and (type(value) is float or (type(value) is int and abs(value) < _LARGEST))
    }
