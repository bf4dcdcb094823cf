"""What MLflow is asked to store, with a stand-in for its package, and with the real one if it is
installed.
"""

import contextlib
import importlib.util
import json
import sqlite3
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest

from tests.support.commands import Trainbox
from tests.trainer.track.conftest import MakeRun, sent, train_entry
from trainbox.contract.errors import NetworkFailure, StorageFailure, WrongUse
from trainer.track.runs import read_run
from trainer.track.send import Tracker


class MlflowException(Exception):
    """An error of MLflow."""


class Client:
    """The part of MlflowClient that is used. The class has what the server stores."""

    runs: ClassVar[dict[str, Any]]
    experiments: ClassVar[dict[str, str]]
    batches: ClassVar[list[int]]
    error: ClassVar[Exception | None] = None

    def get_experiment_by_name(self, name: str) -> Any:
        found = self.experiments.get(name)
        return SimpleNamespace(experiment_id=found) if found else None

    def create_experiment(self, name: str) -> str:
        if self.error is not None:
            raise self.error
        return self.experiments.setdefault(name, f"id of {name}")

    def search_runs(self, experiments: list[str], text: str, max_results: int) -> list[Any]:
        assert experiments == ["id of lab"]
        name, _, value = text.partition(" = ")
        tag = name.removeprefix("tags.").strip("`")
        return [run for run in self.runs.values() if run.data.tags[tag] == value.strip("'")]

    def create_run(
        self, experiment: str, start_time: int, tags: dict[str, str], run_name: str
    ) -> Any:
        info = SimpleNamespace(run_id=f"r{len(self.runs)}", name=run_name, start=start_time)
        data = SimpleNamespace(tags=dict(tags), params={}, metrics={})
        self.runs[info.run_id] = SimpleNamespace(info=info, data=data, status="RUNNING")
        return self.runs[info.run_id]

    def log_batch(self, run_id: str, metrics: Any = (), params: Any = ()) -> None:
        assert len(metrics) <= 1000 and len(params) <= 100
        self.batches.append(len(metrics))
        data = self.runs[run_id].data
        for param in params:
            assert data.params.setdefault(param.key, param.value) == param.value
        for metric in metrics:
            data.metrics.setdefault(metric.key, []).append(metric)

    def get_metric_history(self, run_id: str, name: str) -> list[Any]:
        return list(self.runs[run_id].data.metrics[name])

    def set_tag(self, run_id: str, name: str, value: str) -> None:
        self.runs[run_id].data.tags[name] = value

    def set_terminated(self, run_id: str, status: str, end_time: int) -> None:
        self.runs[run_id].status = (status, end_time)


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> type[Client]:
    for name, empty in (("runs", {}), ("experiments", {}), ("batches", [])):
        monkeypatch.setattr(Client, name, empty, raising=False)
    for name in ("", ".entities", ".exceptions"):
        monkeypatch.setitem(sys.modules, f"mlflow{name}", ModuleType(f"mlflow{name}"))
    mlflow: Any = sys.modules["mlflow"]
    mlflow.MlflowClient, mlflow.get_tracking_uri = Client, lambda: "http://ada:pw@tracker:5000"
    entities: Any = sys.modules["mlflow.entities"]
    entities.Metric = lambda key, value, timestamp, step: SimpleNamespace(
        key=key, value=value, timestamp=timestamp, step=step
    )
    entities.Param = lambda key, value: SimpleNamespace(key=key, value=value)
    exceptions: Any = sys.modules["mlflow.exceptions"]
    exceptions.MlflowException = MlflowException
    for name in ("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "MLFLOW_HTTP_REQUEST_TIMEOUT"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    monkeypatch.setenv("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    return Client


def _tracker(project: str | None = "lab") -> Tracker:
    from trainer.track.to_mlflow import Target

    return Target(project)


def test_a_run_with_its_settings_tags_and_values_is_stored(
    make_run: MakeRun, client: type[Client]
) -> None:
    run = make_run("one", [train_entry(5, loss=0.5), train_entry(6, loss=0.25)], revision="abc1234")
    assert sent(_tracker(), run) == ["1 run, 2 entries"]
    ((run_id, stored),) = client.runs.items()
    assert stored.info == SimpleNamespace(run_id=run_id, name="one", start=1005000)
    assert stored.status == ("FINISHED", 1006000)
    read = read_run(run)
    assert stored.data.params == {name: str(value) for name, value in read.params.items()}
    assert stored.data.tags.pop("trainbox.sent").startswith("2:")
    assert stored.data.tags == {"trainbox.run_id": "one", **read.tags}
    found = [vars(metric) for metric in stored.data.metrics["train/loss"]]
    assert found == [
        {"key": "train/loss", "value": 0.5, "timestamp": 1005000, "step": 5},
        {"key": "train/loss", "value": 0.25, "timestamp": 1006000, "step": 6},
    ]


def test_a_second_send_adds_what_is_new_in_mlflow(make_run: MakeRun, client: type[Client]) -> None:
    run = make_run("one", [train_entry(step, a=step, b=step) for step in range(1, 1201)])
    sent(_tracker(), run)
    assert client.batches == [0, 1000, 1000, 400]
    place = "nothing new: MLflow at http://(not shown)@tracker:5000 has 1 run"
    assert sent(_tracker(), run) == [place]
    data = client.runs["r0"].data
    del data.params["seed"]  # the first process was killed
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_entry(1201, a=1)) + "\n")
    assert sent(_tracker(), run) == ["1 run, 1 entry"]
    assert client.batches[4:] == [0, 1]
    assert [metric.step for metric in data.metrics["train/a"]] == [*range(1, 1202)]
    assert (len(client.runs), data.params["seed"]) == (1, "3")


def _lost() -> Exception:
    error = MlflowException("API request failed")
    error.__cause__ = ConnectionRefusedError(111, "Connection refused")
    return error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (_lost(), NetworkFailure, r"\(not shown\)@tracker:5000 cannot be reached .*refused"),
        (
            sqlite3.OperationalError("database or disk is full"),
            StorageFailure,
            r"cannot be read or written \(database or disk is full\): check its path",
        ),
        (OSError(28, "No space left"), StorageFailure, r"written \(\[Errno 28\] No space left\)"),
        (LookupError("no table"), WrongUse, r"refuses \(no table\)"),
        (ImportError("no psycopg"), ImportError, "no psycopg"),  # its package is then named
        (MlflowException("no access\nfor you"), WrongUse, r"refuses \(no access for"),
    ],
)
def test_errors_of_mlflow_are_failures_of_one_line(
    client: type[Client],
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    kind: type[Exception],
    text: str,
) -> None:
    monkeypatch.setattr(client, "error", error)
    with pytest.raises(kind, match=text) as found:
        _tracker()
    assert "\n" not in str(found.value)


def test_the_experiment_is_that_of_the_environment(
    client: type[Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    _tracker(None)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "mine")
    _tracker(None)
    assert list(client.experiments) == ["trainbox", "mine"]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mlflow") is None, reason="mlflow is not installed")
def test_the_real_mlflow_stores_the_values(
    make_run: MakeRun, trainbox: Trainbox, tmp_path: Path
) -> None:
    run = make_run("one", [train_entry(step, loss=1 / step) for step in (1, 2, 3)])
    env = {"MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    printed = [
        trainbox("track", str(run), "--to", "mlflow", env=env).out.splitlines()[-1]
        for _ in range(2)
    ]
    assert printed[0] == "1 run, 3 entries"
    assert printed[1].startswith("nothing new")
    with contextlib.closing(sqlite3.connect(tmp_path / "mlflow.db")) as database:
        found = database.execute("select step, value, timestamp from metrics order by step")
        assert found.fetchall() == [(1, 1.0, 1001000), (2, 0.5, 1002000), (3, 1 / 3, 1003000)]
        (seed,) = database.execute("select value from params where key = 'seed'").fetchone()
    assert seed == "3"
