"""Metrics are whole lines of JSON in the folder of the run."""

import json
import math
import os
import re
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
import pytest
import torch

import trainbox
from tests.support.paths import ROOT
from trainbox.folder import _default
from trainer.records.jsonl import read_entries


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINBOX_RUN", str(tmp_path / "some/run"))
    return tmp_path / "some/run"


def _entries(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_an_entry_has_the_form_of_a_training_of_trainbox(run: Path) -> None:
    before = time.time()
    trainbox.metrics(50, loss=0.25, epoch=2)
    (line,) = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    assert line.startswith('{"kind": "train", "step": 50, "time_unix_s": ')
    (entry,) = _entries(run)
    assert before - 1 <= entry.pop("time_unix_s") <= time.time() + 1
    assert entry == {"kind": "train", "step": 50, "loss": 0.25, "epoch": 2}
    trainbox.metrics(60, kind="validation", accuracy=1)
    assert [(e["kind"], e["step"]) for e in read_entries(run / "metrics.jsonl")] == [
        ("train", 50),
        ("validation", 60),
    ]


def test_values_become_plain_json(run: Path) -> None:
    trainbox.metrics(
        numpy.int64(3),  # type: ignore[arg-type]
        tensor=torch.tensor(0.5),
        array=numpy.array([[1, 2], [3, 4]]),
        scalar=numpy.float32(0.25),
        not_finite=[math.nan, torch.tensor(math.inf), -math.inf],
        nested={"a": (1, None, True, "ä\n")},
    )
    (entry,) = _entries(run)
    del entry["time_unix_s"]
    assert entry == {
        "kind": "train",
        "step": 3,
        "tensor": 0.5,
        "array": [[1, 2], [3, 4]],
        "scalar": 0.25,
        "not_finite": [None, None, None],
        "nested": {"a": [1, None, True, "ä\n"]},
    }


def test_values_that_json_does_not_have_are_refused(run: Path) -> None:
    with pytest.raises(trainbox.WrongUse, match=r"^metrics\(model=...\) is a Linear, which JSON"):
        trainbox.metrics(1, model=torch.nn.Linear(1, 1))
    with pytest.raises(trainbox.WrongUse, match=r"^metrics\(time_unix_s=...\) is a reserved name"):
        trainbox.metrics(1, time_unix_s=3)
    with pytest.raises(trainbox.WrongUse, match=r"^metrics\(kind='gpus'\) is a reserved kind"):
        trainbox.metrics(1, kind="gpus", loss=0.5)
    assert not (run / "metrics.jsonl").exists()


def test_only_rank_0_writes(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    trainbox.metrics(1, loss=0.5)
    assert not run.exists()
    monkeypatch.setenv("RANK", "0")
    trainbox.metrics(1, loss=0.5)
    assert len(_entries(run)) == 1


def test_lines_of_several_processes_are_not_mixed(run: Path) -> None:
    """`trainbox run` appends events while the script reports metrics."""
    children = []
    for number in range(3):
        if (pid := os.fork()) == 0:
            for step in range(100):
                trainbox.metrics(step, writer=number, text="x" * 3000)
            os._exit(0)
        children.append(pid)
    assert [os.waitpid(pid, 0)[1] for pid in children] == [0, 0, 0]
    found = [(entry["writer"], entry["step"]) for entry in _entries(run)]
    assert sorted(found) == [(number, step) for number in range(3) for step in range(100)]


def test_a_file_that_cannot_be_written_is_a_storage_failure(run: Path) -> None:
    (run / "metrics.jsonl").mkdir(parents=True)
    with pytest.raises(trainbox.StorageFailure, match=rf"^cannot write {run}/metrics.jsonl: "):
        trainbox.metrics(1, loss=0.5)
    (run / "metrics.jsonl").rmdir()
    (run / "metrics.jsonl").symlink_to("elsewhere")
    remedy = "remove the link, or set another folder in TRAINBOX_RUN$"
    with pytest.raises(trainbox.StorageFailure, match=remedy):
        trainbox.metrics(1, loss=0.5)


def test_the_metrics_of_tasks_have_the_same_name() -> None:
    assert trainbox.metrics.accuracy(torch.eye(2)) == 1.0
    with pytest.raises(AttributeError, match="has no attribute 'recall'"):
        trainbox.metrics.recall  # type: ignore[attr-defined]  # noqa: B018


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["train.py"], "train-114745d8"),
        (["train.py", "--lr", "0.1"], "train-ab8605f4"),
        (["/home/me/package/__main__.py"], "package-"),
        (["-c"], "script-"),
        ([""], "script-"),
    ],
)
def test_the_default_folder_has_the_name_of_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], name: str
) -> None:
    monkeypatch.delenv("TRAINBOX_RUN", raising=False)
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("TRAINBOX_RUNS_DIR", raising=False)
    monkeypatch.setitem(sys.modules, "__main__", ModuleType("__main__"))
    _default.cache_clear()
    folder = trainbox.run_folder()
    assert folder.parent == tmp_path / "runs" and folder.name.startswith(name)
    assert folder.is_dir()
    # A script that changes its folder later keeps its run.
    monkeypatch.chdir("/")
    assert trainbox.run_folder() == folder
    _default.cache_clear()


def test_a_folder_that_cannot_be_made_is_a_storage_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRAINBOX_RUN", str(tmp_path / "file/run"))
    with pytest.raises(trainbox.StorageFailure, match="^cannot write .*/file/run: Not a dir"):
        trainbox.run_folder()


def test_the_callback_of_the_page_writes_what_a_trainer_logs(run: Path) -> None:
    page = (ROOT / "docs/guides/own-script.md").read_text(encoding="utf-8")
    (code,) = [
        block
        for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL)
        if "TrainerCallback" in block
    ]
    names: dict[str, Any] = {"trainbox": trainbox, "TrainerCallback": object}
    names |= {"Trainer": lambda *_, callbacks, **__: callbacks, "model": None, "arguments": None}
    exec(compile(code, "page.py", "exec"), names | {"data": None}, found := {})  # noqa: S102
    (callback,) = found["trainer"]
    state = SimpleNamespace(global_step=7)
    callback.on_log(None, state, None, logs={"loss": 0.5, "epoch": 1.0}, model=None)
    (entry,) = _entries(run)
    assert {**entry, "time_unix_s": 0} == {
        "kind": "train",
        "step": 7,
        "time_unix_s": 0,
        "loss": 0.5,
        "epoch": 1.0,
    }
