"""The files that an evaluation writes."""

import json
from pathlib import Path

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


def test_a_folder_where_no_file_can_be_made_is_refused_before_the_evaluation(here: Here) -> None:
    here.train(task="tests.support.tiny:Predicting", max_steps=2)
    words = ("evaluate", "runs/r", "--device", "cpu", "--predictions", "/proc/p.csv")
    err = here.refused(*words, code=4, silent=True)
    assert "/proc/p.csv cannot be written (" in err and "with --predictions FILE" in err
