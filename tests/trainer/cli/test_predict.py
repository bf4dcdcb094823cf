"""`predict`: rows for files on standard output, with the weights of a stored run."""

import csv
import errno
import io
import itertools
import json
import math
import os
import shutil
from pathlib import Path

import pytest
import torch

from tests.support.here import Captured, Here, files_of
from tests.support.ranks import Ranks
from tests.support.tiny import FromFiles, StepCounter
from trainbox.folders.write_failures import writing
from trainer.use.predict import given_files

TASK = "tests.support.tiny:FromFiles"
_NUMBERS = {"a": "1 2 3 4", "b/c": "0.5 -1 2 8", "b/d": "-2 1 1 1", "e": "4 3 2 1", "f": "0 1 1 1"}


def _write_files(folder: Path) -> None:
    for name, numbers in _NUMBERS.items():
        (folder / "new" / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / "new" / f"{name}.txt").write_text(numbers)


@pytest.fixture
def files(tmp_path: Path) -> Path:
    _write_files(tmp_path)
    return tmp_path / "new"


def _predict(here: Here, *words: str, run: str = "r") -> tuple[int, str, str]:
    return here.command("predict", f"runs/{run}", "--device", "cpu", *words)


def _model(here: Here, step: int) -> StepCounter:
    model = StepCounter().eval()
    model.load_state_dict(here.state(step)["model"])
    return model


def test_rows_are_the_outputs_for_the_files_in_their_order(here: Here, files: Path) -> None:
    # The loss falls, so the first validation is the best.
    here.train(task=TASK, best_by="max:loss", workers=0)
    for checkpoint, step in (("best", 6), ("last", 18)):
        code, out, err = _predict(here, "new/e.txt", "new", "--checkpoint", checkpoint)
        assert code == 0
        rows = list(csv.DictReader(io.StringIO(out)))
        names = ["e", "a", "b/c", "b/d", "e", "f"]
        assert [row["file"] for row in rows] == [f"new/{name}.txt" for name in names]
        assert list(rows[0]) == ["file", "output", *(f"scaled_{k}" for k in range(4))]
        inputs_B4 = torch.tensor([[float(n) for n in _NUMBERS[name].split()] for name in names])
        outputs_B = _model(here, step)(inputs_B4).detach()
        assert [float(row["output"]) for row in rows] == pytest.approx(outputs_B.tolist())
        assert float(rows[0]["scaled_1"]) == pytest.approx(float(outputs_B[0]) / 3)
        digest = json.loads((here.path() / "digests.jsonl").read_text().splitlines()[-1])["model"]
        lines = [line for line in err.splitlines() if not line.startswith("reading ")]
        assert len(lines) == 2 and lines[1] == "trainbox: 6 predictions"
        assert lines[0].startswith(f"trainbox: runs/r: {checkpoint} checkpoint, step {step}, ")
        assert lines[0].endswith(digest[:16]) == (checkpoint == "last")
        assert "reading new/e.txt\n" in err


def test_json_lines_have_the_columns_of_csv(here: Here, files: Path) -> None:
    here.train(task=TASK, max_steps=2, workers=0)
    before = files_of(here.path())
    _, rows, _ = _predict(here, "new")
    _, lines, _ = _predict(here, "new", "--format", "jsonl")
    found = [json.loads(line) for line in lines.splitlines()]
    expected = list(csv.DictReader(io.StringIO(rows)))
    assert [list(row) for row in found] == [list(row) for row in expected]
    assert found[-1]["file"] == expected[-1]["file"] == "new/f.txt"
    assert found[1]["output"] == float(expected[1]["output"])
    # The first number of f.txt is 0, so its quotient is infinite.
    assert found[-1]["scaled_0"] is None and math.isinf(float(expected[-1]["scaled_0"]))
    assert files_of(here.path()) == before


def test_one_and_four_processes_write_the_same_rows(ranks: Ranks) -> None:
    _write_files(ranks.folder)
    settings = ("--max-steps", "2", "--batch-size", "2", "--run", "r", "--workers", "0")
    ranks.train(1, TASK, "--device", "cpu", "--threads", "1", *settings)
    command = ("predict", "runs/r", "new", "--device", "cpu")
    alone = ranks(1, *command)
    assert alone.code == 0 and alone.out.count("\n") == 6
    ended = ranks(4, *command)  # the five files are three batches, so one of the processes has none
    assert ended.codes == [0] * 4, ended.errs
    assert ended.outs == [alone.out, "", "", ""]
    # The other machine has other files.
    shutil.copytree(ranks.folder / "new", ranks.folder / "other/new")
    (ranks.folder / "other/new/a.txt").unlink()
    shutil.copytree(ranks.folder / "runs", ranks.folder / "other/runs")
    ended = ranks(2, *command, env_by_rank=[{}, {"OTHER_FOLDER": "other"}])
    assert ended.codes == [2, 2]
    assert "differs in another process: copy the same files to all machines" in ended.errs[0]


# fmt: off
_WRONG = [
    (["new/a.txt", "none.txt"], "none.txt does not exist: name files, or folders of files"),
    (["x" * 300], "cannot be read (File name too long): name files, or folders of files"),
    (["empty"], "empty has no file for this task (.txt): name another folder"),
    (["new", "x.bin"], "load_example('x.bin') raised ValueError (could not convert string to"),
    (["short.txt"], "predictions() raised RuntimeError: addmm: mat1 and mat2 shapes cannot be"),
    (["new/a.txt", "short.txt"],
     "examples have different shapes: pad or crop them in __getitem__, or pad them in collate()"),
    (["new", "--checkpoint", "newest"], "'newest' is not one of 'best', 'last'"),
    (["new", "--format", "xml"], "'xml' is not one of 'csv', 'jsonl'"),
    ([], "Missing argument 'FILES...': the usage is `trainbox predict [OPTIONS] RUN FILES...`"),
]
# fmt: on


def test_wrong_files_and_options_are_one_line(here: Here, files: Path) -> None:
    here.train(task=TASK, max_steps=2, workers=0)
    Path("empty/.hidden").mkdir(parents=True)
    Path("empty/.hidden/a.txt").write_text("1 2 3 4")
    Path("empty/notes.md").write_text("")
    Path("x.bin").write_text("no number")
    Path("short.txt").write_text("1 2")
    for words, message in _WRONG:
        code, out, err = _predict(here, *words)
        assert (code, out) == (2, "")
        lines = [line for line in err.splitlines() if line.startswith("trainbox: ")]
        assert message in lines[-1] and "Traceback" not in err


def test_columns_that_change_between_batches_are_refused(
    here: Here, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here.train(task=TASK, max_steps=2, workers=0)
    sizes = itertools.count(2)
    monkeypatch.setattr(
        FromFiles, "predictions", lambda _, __, batch: {"x": torch.ones(len(batch[1]), next(sizes))}
    )
    code, _, err = _predict(here, *["new"] * 4)
    assert (
        code == 2
        and "statistics() returns differ between batches: return the same columns\n" in err
    )
    monkeypatch.setattr(FromFiles, "predictions", lambda _, __, batch: {"x": batch[0][:, :0]})
    code, _, err = _predict(here, "new/a.txt")
    assert code == 2 and "'x' as Tensor of shape (1, 0): return a tensor of shape (1,) or" in err


def test_a_task_that_cannot_read_files_is_refused(here: Here, files: Path) -> None:
    here.train(task="tests.support.tiny:Predicting", max_steps=2, workers=0)
    err = here.refused("predict", "runs/r", "--device", "cpu", "new", silent=True)
    assert "task Predicting has no method load_example(): define it to return " in err
    assert err.endswith(" and add --anyway, as this changes the task\n")


def test_a_full_disk_is_reported(here: Here, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Captured):
        def write(self, text: str) -> int:
            if text.startswith('{"file": '):
                self.fileno = null.fileno
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return super().write(text)

    here.train(task=TASK, max_steps=2, workers=0)
    monkeypatch.setattr("tests.support.here.Captured", Full)
    with Path(os.devnull).open("w") as null:
        code, out, err = _predict(here, "new", "--format", "jsonl")
    assert code == 4
    assert "cannot write /dev/stdout: No space left on device (" in err
    assert "or write it to another disk" in err


# The search of folders.


def test_folders_are_searched_in_the_order_of_names(tmp_path: Path) -> None:
    names = ("b.png", "A.PNG", "c/z.png", "c/d.e/y.png", "c.png", "x.txt", ".a/h.png", ".i.png")
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("")
    (tmp_path / "c/loop").symlink_to(tmp_path)
    (tmp_path / "linked").mkdir()
    (tmp_path / "k").symlink_to(tmp_path / "linked")
    (tmp_path / "linked/l.png").write_text("")
    (tmp_path / "missing.png").symlink_to("gone.png")
    (tmp_path / "self.png").symlink_to("self.png")
    found = [str(path.relative_to(tmp_path)) for path in given_files([tmp_path], (".png",))]
    inner = ["c/d.e/y.png", "c/z.png", "c.png", "k/l.png", "linked/l.png"]
    assert found == ["A.PNG", "b.png", *inner, "missing.png", "self.png"]
    given = [tmp_path / "x.txt", tmp_path / "k"]
    assert given_files(given, (".png",)) == [tmp_path / "x.txt", tmp_path / "k/l.png"]
    assert given_files([tmp_path / "linked"], ()) == [tmp_path / "linked/l.png"]


def test_a_reader_that_stops_is_not_a_failure_of_the_storage() -> None:
    with pytest.raises(BrokenPipeError), writing(Path("/dev/stdout")):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")
