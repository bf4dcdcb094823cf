"""The running and the killed trainings of a folder of runs as metrics for Prometheus."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from entrypoint.runs.leased import LeasedRuns, leased_runs
from trainbox.processes.streams import message, printable

_TEXTS = {
    "step": "The newest step in metrics.jsonl",
    "loss": "The loss of this step",
    "samples_per_second": "The examples in a second",
    "progress_age_seconds": "Time since the newest step or validation, or since the start",
    "checkpoint_age_seconds": "Time since the newest checkpoint",
    "killed_age_seconds": "Time since the process was killed or lost; only for such trainings",
}


class Trainings(Collector):
    """The trainings that run or were killed, as they were read last."""

    def __init__(self, runs_dir: Path) -> None:
        self._runs_dir, self._newest = runs_dir, LeasedRuns()
        self._is_missing = False

    def follow(self, every_s: float, stop: threading.Event) -> None:
        """Read the folder until `stop`, in a thread, as a file server may hang."""

        def follow() -> None:
            self.read()
            while not stop.wait(every_s):
                self.read()

        threading.Thread(target=follow, name="trainings", daemon=True).start()

    def read(self) -> None:
        known, self._newest = self._newest.unreadable, leased_runs(self._runs_dir)
        for name in self._newest.unreadable.keys() - known:
            message(
                f"{self._runs_dir / name} cannot be read ({self._newest.unreadable[name]}), so its "
                "training has no metrics: let the user of the monitor read the folder"
            )
        if self._runs_dir.is_dir() == self._is_missing:
            self._is_missing = not self._is_missing
            state = "does not exist: there are no metrics of trainings" if self._is_missing else ""
            message(f"the folder of the runs, {self._runs_dir}, {state or 'exists now'}")

    def collect(self) -> Iterator[Metric]:
        """Return each figure and age of each training that has it."""
        now_s, found = time.time(), dict[tuple[str, ...], dict[str, float]]()
        for (name, task), since_unix_s in self._newest.killed.items():
            ages = {"killed_age_seconds": max(0.0, now_s - since_unix_s)}
            found[printable(name), printable(task)] = ages
        for run in self._newest.running:
            ages = {"progress_age_seconds": now_s - run.progress_unix_s}
            if run.saved_unix_s is not None:
                ages["checkpoint_age_seconds"] = now_s - run.saved_unix_s
            # A name may have bytes that are not UTF-8.
            found[printable(run.name), printable(run.task)] = {**run.figures, **ages}
        for name, text in _TEXTS.items():
            family = GaugeMetricFamily(f"trainbox_training_{name}", text, labels=("run", "task"))
            for labels, figures in found.items():
                if name in figures:
                    family.add_metric(labels, figures[name])
            yield family
        text = "The folders in the folder of runs that cannot be read"
        count = len(self._newest.unreadable)
        yield GaugeMetricFamily("trainbox_trainings_unreadable", text, value=count)
