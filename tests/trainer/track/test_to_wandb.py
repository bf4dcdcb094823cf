"""What wandb is asked to store, with a stand-in for its package, and with the real one if it is
installed.
"""

import importlib.util
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.support.commands import Trainbox
from tests.trainer.track.conftest import MakeRun, sent, train_entry
from trainbox.contract.errors import NetworkFailure, StorageFailure, WrongUse
from trainer.track.runs import read_run
from trainer.track.send import Tracker, send_runs


class Error(Exception):
    """The base of wandb's errors."""


class UsageError(Error):
    """A wrong use of wandb."""


class CommError(Error):
    """A lost connection."""


class AuthenticationError(CommError):
    """A login that failed, for any reason."""


class Server:
    """The runs of a project that are stored, or written to a folder in offline mode."""

    def __init__(self) -> None:
        self.mode = "online"
        self.folder: Path | None = None  # another folder than the requested one
        self.runs: dict[str, Any] = {}
        self.inits: list[dict[str, Any]] = []
        self.error: Exception | None = None

    def init(self, **options: Any) -> "OpenRun":
        self.inits.append(options)
        return OpenRun(self, options)

    def run(self, path: str) -> Any:
        if self.error is not None:
            raise self.error
        assert path.startswith("lab/")
        if path not in self.runs:
            raise CommError(f"Could not find run <Run {path}>")
        return self.runs[path]


class StoredRun:
    """A run on the server."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def scan_history(self, keys: list[str], use_cache: bool) -> Iterator[dict[str, Any]]:
        assert not use_cache
        return (row for row in self.rows if row.keys() >= set(keys))


class OpenRun:
    """A run to which rows are logged. They are stored when it is finished."""

    def __init__(self, server: Server, options: dict[str, Any]) -> None:
        self._server, self._rows = server, list[dict[str, Any]]()
        self._id, self._is_online = options["id"], options["resume"] == "allow"
        part = (
            server.folder or Path(options["dir"])
        ) / f"wandb/offline-run-2026_{len(server.inits)}-{self._id}"
        (part / "files").mkdir(parents=True)
        self.dir = str(part / "files")

    def define_metric(self, name: str, **options: Any) -> None:
        assert options == ({"step_metric": "step"} if name == "*" else {"hidden": True})

    def log(self, values: dict[str, Any]) -> None:
        self._rows.append(values)

    def finish(self) -> None:
        if self._is_online:
            stored = self._server.runs.setdefault(f"lab/{self._id}", StoredRun())
            stored.rows += self._rows
        elif Path(self.dir).is_dir():
            Path(self.dir, "rows.json").write_text(json.dumps(self._rows))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    server = Server()
    for name in ("wandb", "wandb.errors"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    wandb: Any = sys.modules["wandb"]
    wandb.errors = errors = sys.modules["wandb.errors"]
    for kind in (Error, UsageError, CommError, AuthenticationError):
        setattr(errors, kind.__name__, kind)
    wandb.setup = lambda: SimpleNamespace(settings=SimpleNamespace(mode=server.mode))
    wandb.init, wandb.Settings = server.init, dict
    wandb.Api = lambda timeout: server
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    return server


def _tracker(project: str | None = "lab") -> Tracker:
    from trainer.track.to_wandb import Target

    return Target(project)


def _row(step: int, **values: float) -> dict[str, float]:
    return {"step": step, "_timestamp": 1000.0 + step} | {
        f"train/{n}": v for n, v in values.items()
    }


def test_a_run_is_stored_on_the_server(make_run: MakeRun, server: Server) -> None:
    run = make_run("s/trial-00001", [train_entry(5, loss=0.5)], revision="abc1234")
    assert sent(_tracker(), run) == ["1 run, 1 entry"]
    (options,) = server.inits
    read = read_run(run)
    names = {"project": "lab", "id": "s-trial-00001", "name": "s/trial-00001", "group": "s"}
    assert options.items() >= names.items()
    assert options["config"] == {**read.params, "manifest": read.tags}
    assert not Path(options["dir"]).exists()
    stored = server.runs["lab/s-trial-00001"]
    *rows, marker = stored.rows
    assert rows == [_row(5, loss=0.5)]
    assert marker["trainbox_sent"].startswith("1:")
    assert sent(_tracker(), run) == ["nothing new: wandb, project lab has 1 run"]
    _append(run, train_entry(6, rate=2))
    assert sent(_tracker(), run) == ["1 run, 1 entry"]
    assert stored.rows[2:-1] == [_row(6, rate=2.0)]
    # The server has not got the marker of rows that it may have.
    stored.rows.pop()
    assert sent(_tracker(), run) == ["1 run, 1 entry"]


def _append(run: Path, entry: dict[str, Any]) -> None:
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(entry) + "\n")


def _parts(run: Path) -> list[list[dict[str, float]]]:
    """Return the rows in each folder of wandb, without those of markers."""
    found = sorted((run / "wandb").glob("offline-run-*/files/rows.json"))
    rows = [json.loads(path.read_text()) for path in found]
    return [[row for row in part if "trainbox_sent" not in row] for part in rows]


def test_an_offline_folder_has_the_whole_run(make_run: MakeRun, server: Server) -> None:
    server.mode = "offline"
    run = make_run("one", [train_entry(5, loss=0.5)])
    killed, foreign = (run / f"wandb/offline-run-2026_0-{name}" for name in ("one", "other"))
    for folder in (killed, foreign):
        folder.mkdir(parents=True)
    assert sent(_tracker(), run) == ["1 run, 1 entry"]
    assert not killed.exists()
    nothing = "nothing new: wandb, project lab (offline) has 1 run"
    assert sent(_tracker(), run) == [nothing]
    _append(run, train_entry(6, loss=0.25))
    assert sent(_tracker(), run) == ["1 run, 2 entries"]
    assert _parts(run) == [[_row(5, loss=0.5), _row(6, loss=0.25)]]
    assert foreign.is_dir()
    # A folder that was removed is written again.
    shutil.rmtree(run / "wandb")
    assert sent(_tracker(), run) == ["1 run, 2 entries"]


def test_follow_writes_one_offline_folder(make_run: MakeRun, server: Server) -> None:
    server.mode = "offline"
    run = make_run("one", [train_entry(5, loss=0.5)])
    sent(_tracker(), run)
    steps = iter([6, 7])

    def wait() -> bool:
        step = next(steps)
        _append(run, train_entry(step, loss=1))
        return step == 7

    lines: list[str] = []
    send_runs([run], _tracker(), lines.append, wait)
    assert lines == ["1 run, 2 entries", "1 run, 1 entry"]
    assert _parts(run) == [[_row(5, loss=0.5), _row(6, loss=1.0), _row(7, loss=1.0)]]


def test_a_run_that_wandb_cannot_write_to_is_refused(
    make_run: MakeRun, server: Server, tmp_path: Path
) -> None:
    """wandb then writes to a temporary folder."""
    server.mode, server.folder = "offline", tmp_path / "elsewhere"
    with pytest.raises(StorageFailure, match=r"one/wandb cannot be written: check its rights"):
        sent(_tracker(), make_run("one", [train_entry(5, loss=0.5)]))


def _answered() -> Exception:
    error = AuthenticationError("Failed to verify credentials")
    error.__cause__ = Exception("401")
    error.__cause__.response = "401"  # type: ignore[attr-defined]
    return error


def _unanswered() -> Exception:
    error = AuthenticationError("Failed to verify credentials")
    error.__cause__ = Exception("no answer")
    error.__cause__.response = None  # type: ignore[attr-defined]
    return error


@pytest.mark.parametrize(
    ("error", "kind", "text"),
    [
        (CommError("timed\nout"), NetworkFailure, r"cannot be reached \(timed out\): check the"),
        (_unanswered(), NetworkFailure, r"cannot be reached \(Failed to verify"),
        (_answered(), WrongUse, r"refuses \(Failed to verify credentials\): log in with `wandb"),
        (UsageError("No API key"), WrongUse, r"refuses \(No API key\)"),
    ],
)
def test_errors_of_wandb_are_failures_of_one_line(
    make_run: MakeRun, server: Server, error: Exception, kind: type[Exception], text: str
) -> None:
    server.error = error
    with pytest.raises(kind, match=text):
        sent(_tracker(), make_run("one", [train_entry(1, loss=1)]))
    assert server.inits == []


def test_a_disabled_wandb_is_refused(server: Server) -> None:
    server.mode = "disabled"
    with pytest.raises(WrongUse, match="wandb is disabled: set WANDB_MODE"):
        _tracker()


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="wandb is not installed")
def test_the_real_wandb_writes_a_part(make_run: MakeRun, trainbox: Trainbox) -> None:
    run = make_run("one", [train_entry(step, loss=1 / step) for step in (1, 2, 3)])
    env = {"WANDB_MODE": "offline"}
    printed = [
        trainbox("track", str(run), "--to", "wandb", env=env).out.splitlines()[-1] for _ in range(2)
    ]
    assert printed[0] == "1 run, 3 entries"
    assert printed[1].startswith("nothing new")
    (part,) = (run / "wandb").glob("offline-run-*-one")
    written = (part / "run-one.wandb").read_bytes()
    assert b"train/loss" in written and b"0.3333333333333333" in written
