"""Send runs to MLflow, through the user's `mlflow` package and its MLFLOW_ variables."""

import contextlib
import fcntl
import logging
import os
import sqlite3
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from trainbox.contract.errors import Failure, NetworkFailure, StorageFailure, WrongUse
from trainbox.contract.secret_rule import without_secrets
from trainer.track.runs import EntryRow, Run
from trainer.track.upload import TrackedRun

_T = TypeVar("_T")

_ID, _SENT = "trainbox.run_id", "trainbox.sent"
_METRICS_IN_A_REQUEST, _PARAMS_IN_A_REQUEST = 1000, 100
_REPORT_AFTER_S = 2.0
# Used if the user does not set them. MLflow itself tries for minutes, reports its own use, and
# prints two lines about each run.
_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "3",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "30",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}


class MlflowTracker:
    """An experiment of MLflow."""

    def __init__(self, project: str | None) -> None:
        """Open the experiment `project`, and create it if it does not exist.

        Raises:
            WrongUse: The server refuses.
            NetworkFailure: The server cannot be reached.
            StorageFailure: A local database, folder or lock cannot be read or written.
            ImportError: The package, or that of the database, is missing.
        """
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        import mlflow

        for logger in ("alembic", "mlflow"):  # they log each table of a new database
            logging.getLogger(logger).setLevel(logging.WARNING)
        name = project or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "trainbox"
        uri = mlflow.get_tracking_uri()
        self.place = without_secrets(f"MLflow at {uri}")
        with (
            _alone() if uri.startswith("sqlite:") else contextlib.nullcontext(),
            _errors(self.place),
        ):
            self._client = mlflow.MlflowClient()
            found = self._client.get_experiment_by_name(name)
            self._experiment = (
                found.experiment_id if found else self._client.create_experiment(name)
            )

    def open(self, run: Run) -> TrackedRun:
        """Return the run in the experiment that has the ID of `run`."""
        with _errors(self.place):
            found = self._client.search_runs(
                [self._experiment], f"tags.`{_ID}` = '{run.id}'", max_results=1
            )
        known = found[0] if found else None
        return _MlflowRun(self._client, self._experiment, run, self.place, known)


class _MlflowRun:
    def __init__(self, client: Any, experiment: str, run: Run, place: str, found: Any) -> None:
        self._client, self._experiment, self._run, self._place = client, experiment, run, place
        self._found, self._end_ms = found, 0
        self.sent: str | None = found.data.tags.get(_SENT) if found else None

    def stored(self) -> set[tuple[str, int]]:
        if self._found is None:
            return set()
        with _errors(self._place):
            return {
                (name, metric.step)
                for name in self._found.data.metrics
                for metric in self._client.get_metric_history(self._found.info.run_id, name)
            }

    def send(self, rows: Sequence[EntryRow]) -> None:
        from mlflow.entities import Metric

        with _errors(self._place):
            run_id = self._described(_milliseconds(rows[0].time_unix_s))
            metrics = [
                Metric(name, value, _milliseconds(found.time_unix_s), found.step)
                for found in rows
                for name, value in found.values.items()
            ]
            for batch in _batches(metrics, _METRICS_IN_A_REQUEST):
                self._client.log_batch(run_id, metrics=batch)
        self._end_ms = _milliseconds(rows[-1].time_unix_s)

    def close(self, sent: str) -> None:
        if self._found is None or self.sent == sent:
            return
        run_id = self._found.info.run_id
        with _errors(self._place):
            self._client.set_tag(run_id, _SENT, sent)
            self._client.set_terminated(run_id, "FINISHED", self._end_ms or None)
        self.sent = sent

    def _described(self, begin_ms: int) -> str:
        """Return the ID of the run in MLflow, which has all settings and tags afterwards."""
        from mlflow.entities import Param

        if self._found is None:
            tags = {_ID: self._run.id, **self._run.tags}
            self._found = self._client.create_run(
                self._experiment, begin_ms, tags, run_name=self._run.name
            )
        run_id: str = self._found.info.run_id
        # MLflow never changes a parameter: a setting that a resume changed keeps its first value.
        missing = [
            Param(name, str(value))
            for name, value in self._run.params.items()
            if name not in self._found.data.params
        ]
        for batch in _batches(missing, _PARAMS_IN_A_REQUEST):
            self._client.log_batch(run_id, params=batch)
        self._run.params.clear()
        return run_id


@contextlib.contextmanager
def _alone() -> Iterator[None]:
    """Wait for this user's other processes that open a SQLite database of MLflow.

    MLflow damages a new database if two processes create its tables at the same time.

    Raises:
        StorageFailure: The lock file cannot be opened or locked.
    """
    path = Path(f"trainbox-mlflow-{os.getuid()}.lock")
    with contextlib.ExitStack() as stack:
        try:
            path = tempfile.gettempdir() / path
            lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            stack.callback(os.close, lock)
            text = f"waiting for another process that opens a database of MLflow: {path} is locked"
            report = threading.Timer(_REPORT_AFTER_S, print, [text], {"file": sys.stderr})
            stack.callback(report.cancel)
            report.start()
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError as error:
            raise StorageFailure(
                f"{path} cannot be locked ({error.strerror}): set TMPDIR to a folder that you can "
                "write"
            ) from error
        report.cancel()
        yield


def _batches(values: Sequence[_T], most: int) -> Iterator[Sequence[_T]]:
    return (values[begin : begin + most] for begin in range(0, len(values), most))


def _milliseconds(time_unix_s: float) -> int:
    return round(time_unix_s * 1000)


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
    status = getattr(error, "get_http_status_code", lambda: 0)()
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
    text = without_secrets(" ".join(str(error).split()))[:300]
    return WrongUse(
        f"{place} refuses (status {status}: {text}): check MLFLOW_TRACKING_URI and your access"
    )
