"""`trainbox compare`: what differs between trainings, and their curves."""

from pathlib import Path

import pytest
from PIL import Image

from tests.support.here import Here
from trainbox.errors import WrongUse
from trainer.use.compare import compare


def test_only_what_differs_is_shown(here: Here) -> None:
    here.train("a", max_steps=12)
    here.train("b", max_steps=12, learning_rate=0.01)
    here.train("c", max_steps=18, learning_rate=0.02, seed=3)
    runs = [here.folder / "runs" / name for name in "abc"]
    lines = compare(runs, here.folder / "curves.png").splitlines()
    cells = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert lines[0].split() == ["a", "b", "c"]
    assert cells["max_steps"] == ["12", "12", "18"]
    assert cells["learning_rate"][1:] == ["0.01", "0.02"]
    assert cells["seed"] == ["0", "0", "3"]
    assert cells["software"] == cells["hardware"] == ["the", "same"]
    assert len(cells["loss"]) == 3
    assert not {"batch_size", "optimizer", "run_id", "argv"} & cells.keys()
    with Image.open(here.folder / "curves.png") as picture:
        assert picture.width > picture.height > 200


def test_equal_runs_differ_in_nothing(here: Here) -> None:
    for name in "ab":
        here.train(name, max_steps=6)
    out = compare([here.folder / "runs" / name for name in "ab"], here.folder / "c.svg")
    assert out.count("the same") == 5


def test_what_cannot_be_compared_is_refused(here: Here, tmp_path: Path) -> None:
    here.train("a", max_steps=6)
    here.train("b", max_steps=6)
    one, two = (here.folder / "runs" / name for name in "ab")
    for runs in ([one], [one, one / "." / ".." / "a"]):
        with pytest.raises(WrongUse, match="needs two different runs"):
            compare(runs, tmp_path / "c.png")
    with pytest.raises(WrongUse, match="none"):
        compare([one, tmp_path / "none"], tmp_path / "c.png")
    with pytest.raises(WrongUse, match=r"--figure .*c.doc"):
        compare([one, two], tmp_path / "c.doc")
