"""The files that an evaluation writes."""

import json
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from trainer.use.evaluation_files import check_predictions, write_results

from trainbox.contract.errors import StorageFailure, WrongUse
from trainer.parallel.world import World


def test_a_picture_with_a_slash_in_its_name_is_in_the_folder(tmp_path: Path) -> None:
    picture = torch.zeros(3, 4, 5, dtype=torch.uint8)
    write_results(tmp_path, {"step": 7}, {"examples/wrong": picture})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "evaluation.json",
        "examples-wrong.png",
    ]
    assert json.loads((tmp_path / "evaluation.json").read_text()) == {"step": 7}


def test_wrong_ids_and_a_folder_without_permission_are_refused_before_the_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    evaluation = SimpleNamespace(dataset=[1], size=1)
    job: Any = SimpleNamespace(
        task=0, evaluation=evaluation, world=World(0, 1, torch.device("cpu"))
    )
    check_predictions(tmp_path / "new/p.csv", job)
    evaluation.dataset = SimpleNamespace(ids=["a", "b"])
    with pytest.raises(WrongUse, match="the dataset has 1 examples but 2 ids"):
        check_predictions(tmp_path / "new/p.csv", job)
    evaluation.dataset = [1]
    monkeypatch.setattr(os, "access", lambda path, _mode: path != tmp_path / "new")
    with pytest.raises(StorageFailure, match=r"new/p.csv cannot be written \(Permission denied\)"):
        check_predictions(tmp_path / "new/p.csv", job)
