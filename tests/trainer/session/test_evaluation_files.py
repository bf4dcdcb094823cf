"""The files that an evaluation writes."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from trainer.errors import StorageFailure
from trainer.session.evaluation_files import check_predictions, write_results


def test_a_picture_with_a_slash_in_its_name_is_in_the_folder(tmp_path: Path) -> None:
    picture = torch.zeros(3, 4, 5, dtype=torch.uint8)
    write_results(tmp_path, {"step": 7}, {"examples/wrong": picture})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "evaluation.json",
        "examples-wrong.png",
    ]
    assert json.loads((tmp_path / "evaluation.json").read_text()) == {"step": 7}


def test_a_folder_without_permission_is_refused_before_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = SimpleNamespace(dataset=[1], size=1)
    job: Any = SimpleNamespace(evaluation=evaluation, world=SimpleNamespace(is_first=True))
    check_predictions(tmp_path / "new/p.csv", job)
    monkeypatch.setattr(os, "access", lambda path, _mode: path != tmp_path / "new")
    with pytest.raises(StorageFailure, match=r"new/p.csv cannot be written \(Permission denied\)"):
        check_predictions(tmp_path / "new/p.csv", job)
