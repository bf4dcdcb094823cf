"""`import trainbox` is cheap, and works beside a user's own `trainer.py`."""

import subprocess
import sys
from pathlib import Path

import pytest

import trainbox
from tests.support.commands import clean_environment

_SCRIPT = """
import sys
import trainbox
trainbox.metrics(1, loss=0.5)
assert callable(trainbox.metrics.macro_f1)
assert sorted(trainbox.epoch_order(0, 0, 4)) == [0, 1, 2, 3]
print(trainbox.run_folder().name, trainbox.stop_requested())
print(sorted({"torch", "trainer", "entrypoint"} & set(sys.modules)))
import trainer
print(trainbox.Task.__name__, trainbox.Classification.__name__, trainbox.pictures.__name__)
"""


def test_a_script_beside_its_own_trainer_needs_neither_ours_nor_torch(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(_SCRIPT)
    (tmp_path / "trainer").mkdir()
    (tmp_path / "trainer/__init__.py").write_text("print('the trainer of the user')\n")
    ended = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=clean_environment(),
        capture_output=True,
        text=True,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    first, loaded, theirs, names = ended.stdout.splitlines()
    folder, stop = first.split()
    assert (stop, loaded) == ("False", "[]")
    assert theirs == "the trainer of the user"
    assert names == "Task Classification trainbox.pictures"
    assert (tmp_path / "runs" / folder / "metrics.jsonl").exists()


def test_all_public_names_exist_and_no_others() -> None:
    assert all(getattr(trainbox, name) is not None for name in trainbox.__all__)
    with pytest.raises(AttributeError, match="module 'trainbox' has no attribute 'Trainer'"):
        trainbox.Trainer  # noqa: B018
