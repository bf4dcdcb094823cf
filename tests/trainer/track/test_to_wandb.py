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
from tests.trainer.track.conftest import MakeRun, train_entry
from trainbox.contract.errors import NetworkFailure, StorageFailure, WrongUse
from trainer.track.upload import Tracker, Upload, send_once


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
        self.disk_is_full = False
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
        self.config: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []

    def scan_history(self, use_cache: bool) -> Iterator[dict[str, Any]]:
        assert not use_cache
        names = {name for row in self.rows for name in row}
        return ({name: row.get(name) for name in names} for row in self.rows)

    def update(self) -> None:
        """Store the changed configuration."""


class OpenRun:
    """A run to which rows are logged. They are stored when it is finished."""

    def __init__(self, server: Server, options: dict[str, Any]) -> None:
        self._server, self._rows = server, list[dict[str, Any]]()
        self._id, self._is_online = options["id"], "resume" in options
        part = Path(options["dir"]) / f"wandb/offline-run-2026_{len(server.inits)}-{self._id}"
        (part / "files").mkdir(parents=True)
        self.dir = str(part / "files")
        self.config: dict[str, Any] = {}

    def define_metric(self, name: str, **options: Any) -> None:
        assert (name, options) in (("step", {"hidden": True}), ("*", {"step_metric": "step"}))

    def log(self, values: dict[str, Any], step: int | None) -> None:
        assert (step is None) == self._is_online
        self._rows.append(values if step is None else {"_step": step, **values})

    def finish(self) -> None:
        if self._is_online:
            stored = self._server.runs.setdefault(f"lab/{self._id}", StoredRun())
            stored.rows += self._rows
        elif Path(self.dir).is_dir():
            Path(self.dir, "rows.json").write_text(json.dumps(self._rows))
            if not self._server.disk_is_full:
                # A block of 32 KiB ends in the last record, and 7 bytes begin the next one.
                text = json.dumps(self.config).encode().rjust(2**15 + 10, b"-")
                file = Path(self.dir).parent / f"run-{self._id}.wandb"
                file.write_bytes(text[: 2**15] + b"\0" * 7 + text[2**15 :])


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
    from trainer.track.to_wandb import WandbTracker

    return WandbTracker(project)


def _row(step: int, **values: float) -> dict[str, float]:
    return {"step": step, "_timestamp": 1000.0 + step} | {
        f"train/{n}": v for n, v in values.items()
    }


def test_a_run_is_stored_on_the_server(make_run: MakeRun, server: Server) -> None:
    run = make_run("s/trial-00001", [train_entry(5, loss=0.5)], revision="abc1234")
    assert send_once([run], _tracker()) == "1 run, 1 entry"
    (options,) = server.inits
    assert {name: options[name] for name in ("project", "id", "name", "group", "config")} == {
        "project": "lab",
        "id": "s-trial-00001",
        "name": "s/trial-00001",
        "group": "s",
        "config": {
            "task": "digits",
            "seed": 3,
            "optimizer": "adamw",
            "task.width": 8,
            "manifest": {"revision": "abc1234", "sweep": "s"},
        },
    }
    assert not Path(options["dir"]).exists()
    stored = server.runs["lab/s-trial-00001"]
    assert stored.rows == [_row(5, loss=0.5)]
    assert send_once([run], _tracker()) == "nothing new: wandb, project lab has 1 run"
    # The process was killed before it had marked the run.
    stored.config.clear()
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_entry(6, rate=2)) + "\n")
    assert send_once([run], _tracker()) == "1 run, 1 entry"
    assert stored.rows == [_row(5, loss=0.5), _row(6, rate=2.0)]
    assert len(stored.config["trainbox_sent"]) == 64


def _parts(run: Path) -> list[list[dict[str, float]]]:
    found = sorted((run / "wandb").glob("offline-run-*/files/rows.json"))
    return [json.loads(path.read_text()) for path in found]


def test_offline_parts_hold_each_value_once(make_run: MakeRun, server: Server) -> None:
    server.mode = "offline"
    run = make_run("one", [train_entry(5, loss=0.5), train_entry(5, kind="validation", a=1)])
    foreign = run / "wandb/offline-run-2026_9-other"
    foreign.mkdir(parents=True)
    # A process that is killed before it has finished leaves a part.
    killed = Upload(run, _tracker())
    killed.look()
    killed._release()
    assert len(list((run / "wandb").glob("offline-run-*-one"))) == 1
    assert send_once([run], _tracker()) == "1 run, 2 entries"
    nothing = "nothing new: wandb, project lab (offline) has 1 run"
    assert send_once([run], _tracker()) == nothing
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(train_entry(6, loss=0.25)) + "\n")
    assert send_once([run], _tracker()) == "1 run, 1 entry"
    first = [
        {"_step": 0, **_row(5, loss=0.5)},
        {"_step": 1, "step": 5, "_timestamp": 1005.0, "validation/a": 1.0},
    ]
    assert _parts(run) == [first, [{"_step": 2, **_row(6, loss=0.25)}]]
    assert len(list((run / "wandb").glob("offline-run-*-one"))) == 2
    assert foreign.is_dir()
    (run / "wandb/trainbox.json").write_text("{}")
    with pytest.raises(StorageFailure, match=r"wandb/trainbox.json is damaged: restore it, or"):
        send_once([run], _tracker())


def test_a_full_disk_that_wandb_hides_loses_nothing(make_run: MakeRun, server: Server) -> None:
    server.mode, server.disk_is_full = "offline", True
    run = make_run("one", [train_entry(5, loss=0.5)])
    with pytest.raises(StorageFailure, match="wandb has not written all entries to .*: free some"):
        send_once([run], _tracker())
    server.disk_is_full = False
    assert send_once([run], _tracker()) == "1 run, 1 entry"
    assert _parts(run) == [[{"_step": 0, **_row(5, loss=0.5)}]]


def test_offline_parts_of_a_removed_run_are_not_stated(make_run: MakeRun, server: Server) -> None:
    server.mode = "offline"
    run = make_run("one", [train_entry(5, loss=0.5)])
    upload = Upload(run, _tracker())
    assert upload.look() == 1
    shutil.move(run, run.with_name("away"))
    upload.close()
    assert not run.exists()


def test_offline_parts_of_another_run_in_the_folder_are_not_its_own(
    make_run: MakeRun, server: Server
) -> None:
    """The files of another run were copied over those of the run."""
    server.mode = "offline"
    run = make_run("one", [train_entry(5, loss=0.5)])
    upload = Upload(run, _tracker())
    assert upload.look() == 1
    other = make_run("other", [train_entry(5, loss=0.25)])
    for name in ("manifest.json", "metrics.jsonl"):
        (other / name).replace(run / name)
    assert upload.look() == 1
    upload.close()
    row = {"_step": 0, **_row(5, loss=0.5)}
    assert _parts(run) == [[row], [{**row, "train/loss": 0.25}]]
    assert send_once([run], _tracker()).startswith("nothing new")


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
        send_once([make_run("one", [train_entry(1, loss=1)])], _tracker())
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
