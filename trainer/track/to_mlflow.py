"""Send runs to MLflow, through the user's `mlflow` package and its MLFLOW_ variables."""

import contextlib
import logging
import os
import sqlite3
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar

from trainbox.contract.errors import Failure, NetworkFailure, StorageFailure, WrongUse
from trainbox.contract.secret_rule import without_secrets
from trainer.track.runs import EntryRow, Run
from trainer.track.send import TrackedRun

_T = TypeVar("_T")

_ID, _SENT = "trainbox.run_id", "trainbox.sent"
_METRICS_IN_A_REQUEST, _PARAMS_IN_A_REQUEST = 1000, 100
# Used if the user does not set them. MLflow itself tries for minutes, reports its own use, and
# prints two lines about each run.
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class Target:
    """An experiment of MLflow."""

    def __init__(self, project: str | None) -> None:
        """Open the experiment `project`, and create it if it does not exist.

        Raises:
            WrongUse: The server refuses.
            NetworkFailure: The server cannot be reached.
            StorageFailure: A local database or folder cannot be read or written.
            ImportError: The package, or that of the database, is missing.
        """
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        import mlflow

        for logger in ("alembic", "mlflow"):  # they log each table of a new database
            logging.getLogger(logger).setLevel(logging.WARNING)
        name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "trainbox"
        self.place = without_secrets(f"MLflow at {mlflow.get_tracking_uri()}")
        with _errors(self.place):
            self._client = mlflow.MlflowClient()
            found = self._client.get_experiment_by_name(name)
            self._experiment = (
                found.experiment_id if found else self._client.create_experiment(name)
            )

    def open(self, run: Run, _now: str) -> TrackedRun:
        """Return the run in the experiment that has the ID of `run`."""
        return _MlflowRun(self._client, self._experiment, run, self.place)


class _MlflowRun:
    def __init__(self, client: Any, experiment: str, run: Run, place: str) -> None:
        self._client, self._experiment, self._run, self._place = client, experiment, run, place
        with _errors(place):
            found = client.search_runs([experiment], f"tags.`{_ID}` = '{run.id}'", max_results=1)
        # MLflow never changes a parameter: a setting that a resume changed keeps its first value.
        known = found[0].data.params if found else {}
        self._missing = {name: x for name, x in run.params.items() if name not in known}
        self._id: str = found[0].info.run_id if found else ""
        self._end_ms = 0
        self.sent: str = found[0].data.tags.get(_SENT, "") if found else ""

    def send(self, rows: Sequence[EntryRow], sent: str) -> None:
        from mlflow.entities import Metric, Param

        times_ms = [round(row.time_unix_s * 1000) for row in rows]
        metrics = [
            Metric(name, value, time_ms, row.step)
            for row, time_ms in zip(rows, times_ms, strict=True)
            for name, value in row.values.items()
        ]
        params = [Param(name, str(value)) for name, value in self._missing.items()]
        with _errors(self._place):
            if not self._id:
                tags, name = {_ID: self._run.id, **self._run.tags}, self._run.name
                begun = self._client.create_run(self._experiment, times_ms[0], tags, run_name=name)
                self._id = begun.info.run_id
            for some_params in _batches(params, _PARAMS_IN_A_REQUEST):
                self._client.log_batch(self._id, params=some_params)
            for some in _batches(metrics, _METRICS_IN_A_REQUEST):
                self._client.log_batch(self._id, metrics=some)
            self._client.set_tag(self._id, _SENT, sent)
        self.sent, self._missing, self._end_ms = sent, {}, times_ms[-1]

    def close(self) -> None:
        with _errors(self._place):
            self._client.set_terminated(self._id, "FINISHED", self._end_ms)


def _batches(values: Sequence[_T], most: int) -> Iterator[Sequence[_T]]:
    return (values[begin : begin + most] for begin in range(0, len(values), most))


@contextlib.contextmanager
def _errors(place: str) -> Iterator[None]:
    """Raise MLflow's errors, and those of its database, as failures of one line."""
    try:
        yield
    except (ImportError, Failure):
        raise
    except Exception as error:
        raise _failure(place, error) from error


def _failure(place: str, error: Exception) -> Failure:
    chain: list[BaseException] = [error]
    while following := chain[-1].__cause__ or chain[-1].__context__:
        chain.append(following)
    lost = any(isinstance(part, ConnectionError | TimeoutError) for part in chain)
    lost |= any(type(part).__module__.startswith(("requests", "urllib3")) for part in chain)
    reason = without_secrets(" ".join(str(chain[-1]).split()))[:300]
    if lost:
        return NetworkFailure(
            f"{place} cannot be reached ({reason}): check MLFLOW_TRACKING_URI and the network, and "
            "start the same command again"
        )
    if any(isinstance(part, OSError | sqlite3.Error) for part in chain):
        return StorageFailure(
            f"{place} cannot be read or written ({reason}): check its path, its rights and the "
            "free space"
        )
    return WrongUse(f"{place} refuses ({reason}): check MLFLOW_TRACKING_URI and your access")
