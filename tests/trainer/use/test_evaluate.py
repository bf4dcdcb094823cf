"""The files that an evaluation writes."""

import json
import os
from pathlib import Path

import pytest
import torch

from tests.support.here import Here
from trainer.use.evaluate import write_results


def test_a_picture_with_a_slash_in_its_name_is_in_the_folder(tmp_path: Path) -> None:
    picture = torch.zeros(3, 4, 5, dtype=torch.uint8)
    write_results(tmp_path, {"step": 7}, {"examples/wrong": picture})
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "evaluation.json",
        "examples-wrong.png",
    ]
    assert json.loads((tmp_path / "evaluation.json").read_text()) == {"step": 7}


def test_a_folder_without_permission_is_refused_before_the_evaluation(
    here: Here, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train(task="tests.support.tiny:Predicting", max_steps=2)
    access = os.access
    monkeypatch.setattr(
        os, "access", lambda path, *how, **more: path != Path("new") and access(path, *how, **more)
    )
    words = ("evaluate", "runs/r", "--device", "cpu", "--predictions", "new/p.csv")
    code, out, err = here.command(*words)
    assert (code, out) == (4, "")
    assert "new/p.csv cannot be written (Permission denied)" in err
    monkeypatch.undo()
    assert here.command(*words)[0] == 0
    assert Path("new/p.csv").exists()
