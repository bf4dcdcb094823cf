"""The folder of a run: a full disk, and a symbolic link."""

import os
import time
from pathlib import Path

import pytest

from trainbox.errors import StorageFailure, WrongUse
from trainbox.folders import lease
from trainbox.folders.lease import LEASE
from trainbox.folders.record_folder import METRICS
from trainer.records import run_log
from trainer.records.jsonl import read_entries
from trainer.records.run_folder import RunFolder
from trainer.records.run_log import RunLog


def test_an_entry_that_does_not_fit_is_reported_with_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = RunFolder(tmp_path / "r", writes=True)
    folder.append(METRICS, {"kind": "train", "step": 1})
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:9]))
    with pytest.raises(StorageFailure, match=r"cannot write \S+/r/metrics.jsonl: No space left"):
        folder.append(METRICS, {"kind": "train", "step": 2})
    monkeypatch.undo()
    folder.append(METRICS, {"kind": "train", "step": 3})
    assert [entry["step"] for entry in read_entries(folder.path / METRICS)] == [1, 3]
    folder.close()


def test_a_run_may_be_a_link_and_has_one_lease(tmp_path: Path) -> None:
    target, link = tmp_path / "disk" / "r", tmp_path / "runs" / "r"
    link.parent.mkdir()
    target.mkdir(parents=True)
    link.symlink_to(target)
    folder = RunFolder(link, writes=True)
    with pytest.raises(WrongUse, match="^another process uses "):
        RunFolder(target, writes=True)
    assert {path.name for path in target.iterdir()} == {"checkpoints", "lock", "logs"}
    folder.close()
    RunFolder(target, writes=True).close()


def test_the_lease_is_renewed_while_nothing_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_log, "RENEW_S", 0.01)
    monkeypatch.setattr(lease, "RENEW_S", 0.01)
    run = RunLog(tmp_path / "r", 0)
    path = run.path / LEASE
    os.utime(path, (0, 0))
    while not path.stat().st_mtime:
        time.sleep(0.01)
    run.close()
    assert not path.exists()


def test_a_link_without_a_target_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "r").symlink_to(tmp_path / "gone")
    with pytest.raises(StorageFailure, match=r"cannot write \S+/r"):
        RunFolder(tmp_path / "r", writes=True)
